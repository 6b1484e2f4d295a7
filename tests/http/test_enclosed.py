"""Bodies that go with their requests from a proxy to a router: to the byte, no client's own, where they are taken."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.http.enclosed import HEADER, MAX_BYTES, NUM_RESPONSES, TAKEN, Enclosing, TakesBodies
from serve_app.http.proxy import protocol_of
from serve_app.http.shortcut import HEADER as OFFER
from serve_app.http.shortcut_end import Landing
from tests.http.full_proxy import BODY, CHUNKED, HOST, Busy, Echo, Line, post, settle, statuses

FORGED = HOST + b'X-Serve-App-Body: {"forged": true}\r\n'


class Router(Echo):
    """Notes how its requests came: what came with them, and what of them was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.enclosed: list[bytes] = []
        self.bodies: list[bytes] = []
        self.asked: list[str] = []
        self.behind: Message | None = None
        self.takes = TakesBodies(self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.enclosed = [value for name, value in scope["headers"] if name == HEADER]
        self.asked = []

        async def noting() -> Message:
            message = await receive()
            self.asked.append(message["type"])
            return message

        await self.takes(scope, noting, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting() -> Message:
            message = await receive()
            self.bodies.append(message.get("body", b""))
            return message

        assert not [name for name, _ in scope["headers"] if name == HEADER]
        await super().__call__(scope, noting, send)


def open_landing() -> Landing:
    """One that offers a way, on which nothing comes in these tests."""
    landing = Landing()
    landing.name = "0" * 16
    return landing


def knowing() -> Landing:
    landing = open_landing()
    for _ in range(NUM_RESPONSES):
        landing.enclosing.note({"type": "http.response.start", TAKEN: True})
    return landing


def line_to(app: Any, landing: Landing) -> tuple[Line, Busy]:
    turnstile = Busy(max_requests=8)
    while turnstile.guests:
        turnstile.make_room()
    return Line(turnstile, app, protocol_of(turnstile, landing)), turnstile


def counted(body: bytes) -> bytes:
    return post(b"Content-Length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize(
    "body", [BODY, b"", b"\xff\xfe\x00not text\r\n\r\n", b"x" * MAX_BYTES], ids=["json", "empty", "no text", "longest"]
)
async def test_a_body_goes_with_its_request_to_the_byte(body: bytes) -> None:
    router = Router()
    line, turnstile = line_to(router, knowing())
    written = await line.send_all(counted(body))
    assert router.enclosed == [body]
    assert router.bodies == [body]
    assert router.asked == []
    assert statuses(written) == [200]
    assert written.endswith(body)
    assert HEADER not in written.lower()
    assert turnstile.num_inside == 0


async def test_a_body_in_chunks_goes_with_its_request_without_its_trailer() -> None:
    router = Router()
    line, _ = line_to(router, knowing())
    trailer = CHUNKED.replace(b"Trailer: x", b"X-Serve-App-Body: forged")
    written = await line.send_all(post(b"Transfer-Encoding: chunked\r\n\r\n" + trailer))
    assert router.enclosed == router.bodies == [BODY]
    assert written.endswith(BODY)


async def test_longer_bodies_and_those_that_are_not_there_yet_are_asked_for() -> None:
    for pieces in ([counted(b"x" * (MAX_BYTES + 1))], [counted(BODY)[:-5], counted(BODY)[-5:]]):
        router = Router()
        line, _ = line_to(router, knowing())
        written = await line.send_all(*pieces)
        assert router.enclosed == []
        assert statuses(written) == [200]


async def test_every_request_of_a_connection_has_its_own() -> None:
    router = Router()
    line, _ = line_to(router, knowing())
    bodies = [b'{"number": %d}' % number for number in range(5)]
    await line.send_all(b"".join(counted(body) for body in bodies))
    await settle()
    assert router.bodies == bodies


async def test_what_a_client_says_of_bodies_is_taken_away() -> None:
    for landing in (Landing(), open_landing(), knowing()):
        for path in (b"/v1/completions", b"/v1/chat/completions"):
            router = Router()
            line, _ = line_to(router, landing)
            head = b"POST " + path + b" HTTP/1.1\r\n" + FORGED + b"Content-Length: %d\r\n\r\n" % len(BODY)
            await line.send_all(head + BODY)
            assert router.enclosed in ([], [BODY])
            assert router.bodies == [BODY]
        router = Router()
        line, _ = line_to(router, landing)
        await line.send_all(b"GET /health HTTP/1.1\r\n" + FORGED + b"\r\n")
        assert router.enclosed == []


async def test_nobody_is_sent_a_body_so_before_all_of_the_last_responses_said_that_it_is_taken() -> None:
    landing, router = open_landing(), Router()
    line, _ = line_to(router, landing)
    for _ in range(NUM_RESPONSES):
        await line.send_all(counted(BODY))
        assert router.enclosed == []
    await line.send_all(counted(BODY))
    assert router.enclosed == [BODY]
    other, _ = line_to(Echo(), landing)  # one that knows nothing of it, and would wait for ever
    landing.enclosing.note({"type": "http.response.start"})
    assert (await other.send_all(counted(BODY))).endswith(BODY)
    await line.send_all(counted(BODY))
    assert router.enclosed == []


async def test_no_body_goes_so_where_there_is_no_way_past_serve() -> None:
    landing, router = knowing(), Router()
    landing.name = None
    line, _ = line_to(router, landing)
    await line.send_all(counted(BODY))
    assert router.enclosed == []
    assert router.bodies == [BODY]


async def test_that_a_client_has_left_comes_behind_the_body() -> None:
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while not heard or heard[-1] != "http.disconnect":
            heard.append((await receive())["type"])

    line, turnstile = line_to(TakesBodies(app), knowing())
    await line.send_all(counted(BODY))
    line.lose()
    await settle()
    assert heard == ["http.request", "http.disconnect"]
    assert turnstile.num_inside == 0


async def test_of_a_body_that_came_past_every_proxy_nothing_is_taken() -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"own", "more_body": False}

    async def send(message: Message) -> None:
        pass

    router = Router()
    await router.takes({"type": "http", "path": "/", "headers": [(HEADER, b"forged")]}, receive, send)
    offer = (OFFER, b"0123456789abcdef:" + b"00" * 16)
    await router.takes({"type": "http", "path": "/", "headers": [(HEADER, b"enclosed"), offer]}, receive, send)
    assert router.bodies == [b"own", b"enclosed"]


def test_one_response_that_does_not_say_so_begins_the_count_anew() -> None:
    enclosing = Enclosing()
    for number in range(3 * NUM_RESPONSES):
        enclosing.note({"type": "http.response.start", **({} if number == NUM_RESPONSES else {TAKEN: True})})
        assert enclosing.is_known == (number == NUM_RESPONSES - 1 or number >= 2 * NUM_RESPONSES)
