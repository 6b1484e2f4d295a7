"""Pieces of streams on their way past Serve: whole, in order, no more than clients take, and only where they belong."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.http import shortcut_start
from serve_app.http.shortcut import HEAD, HEADER, LINE, MAX_PIECE, Frames, folder, framed, offered, path_of
from serve_app.http.shortcut_end import ABANDONED_S, HIGH_BYTES, Landing, ShortcutLost
from serve_app.http.shortcut_start import MAX_PROXIES, TakesShortcuts
from tests.http.full_proxy import HOST, Echo, Line
from tests.http.test_shedding import Busy

START: Message = {"type": "http.response.start", "status": 200, "headers": []}


def piece(body: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


class Streams:
    """An application that says so many pieces, the last one by itself; notes what its server would not take."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.num_taken = 0
        self.error: OSError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        try:
            for number, body in enumerate(self.pieces, 1):
                await send(piece(body, is_last=number == len(self.pieces)))
                self.num_taken = number
        except OSError as error:
            self.error = error


class Client:
    """Takes what it is sent, while it may. stops_after: so many messages, until it is told to go on"""

    def __init__(self, *, stops_after: int | None = None) -> None:
        self._stops_after = stops_after
        self.messages: list[Message] = []
        self.has_failed = False
        self.takes = asyncio.Event()
        self.takes.set()

    async def send(self, message: Message) -> None:
        await self.takes.wait()
        self.messages.append(message)
        if len(self.messages) == self._stops_after:
            self.takes.clear()

    def fail(self) -> None:
        self.has_failed = True

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


class Serve:
    """Stands for Serve between the two: messages take their time, each way of it a task of its own."""

    def __init__(self, landing: Landing, app: Any, *, slow_s: float = 0.0) -> None:
        self._landing = landing
        self._app = app
        self._slow_s = slow_s
        self.passed: list[Message] = []

    async def ask(self, client: Client) -> None:
        scope: Scope = {"type": "http", "headers": []}
        queue: asyncio.Queue[Message | None] = asyncio.Queue()

        async def call() -> None:
            try:
                await self._app(scope, receive, queue.put)
            finally:
                await queue.put(None)

        with self._landing.relay(scope, client.send, on_failure=client.fail) as relaying:
            calling = asyncio.create_task(call())
            try:
                while message := await queue.get():
                    await asyncio.sleep(self._slow_s)
                    self.passed.append(message)
                    await relaying(message)
                await calling
            finally:
                calling.cancel()


async def receive() -> Message:
    raise AssertionError("nobody reads here")


@pytest.fixture
async def landing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Landing]:
    with tempfile.TemporaryDirectory(prefix="sa") as place:  # a path of a socket is short
        monkeypatch.setattr(tempfile, "tempdir", place)
        landing = Landing()
        await landing.open()
        yield landing
        landing.close()
        await asyncio.sleep(0.01)  # routers hear of it


async def until(what: Any) -> None:
    async with asyncio.timeout(10):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("slow_s", [0.0, 0.02])
async def test_pieces_come_whole_and_in_order_however_slow_serve_is(landing: Landing, slow_s: float) -> None:
    client, num_taken = Client(), 0
    pieces = [b"%d " % number for number in range(500)] + [b"x" * (3 * MAX_PIECE + 1), b"", b"end"]

    def take() -> None:
        nonlocal num_taken
        num_taken += 1

    serve = Serve(landing, TakesShortcuts(Streams(*pieces), on_taken=take), slow_s=slow_s)
    async with asyncio.timeout(30):
        await serve.ask(client)
    assert client.body == b"".join(pieces)
    assert client.messages[0]["type"] == "http.response.start"
    assert [message["more_body"] for message in client.messages[1:]] == [True] * (len(client.messages) - 2) + [False]
    assert [message["type"] for message in serve.passed] == ["http.response.start", "http.response.body"]
    assert num_taken == 1
    assert not landing.relays


async def test_many_streams_share_one_connection_and_no_piece_goes_astray(landing: Landing) -> None:
    clients = [Client() for _ in range(20)]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        offer = offered(scope)
        assert offer is not None
        streams = Streams(*[offer[1].hex().encode()] * 100)
        await streams(scope, receive, send)

    serve = Serve(landing, TakesShortcuts(app))
    asking = [asyncio.create_task(serve.ask(client)) for client in clients]
    await asyncio.gather(*asking)
    assert len(landing.lines) == 1
    bodies = {client.body for client in clients}
    assert len(bodies) == 20
    assert all(body == body[:32] * 100 for body in bodies)


async def test_a_response_of_one_piece_goes_through_serve(landing: Landing) -> None:
    client = Client()
    serve = Serve(landing, TakesShortcuts(Streams(b"whole")))
    await serve.ask(client)
    assert client.body == b"whole"
    assert serve.passed == [START, piece(b"whole", is_last=True)]


async def test_what_cannot_be_reached_goes_through_serve(landing: Landing) -> None:
    client = Client()
    landing.name = "0" * 16  # a proxy of another machine
    serve = Serve(landing, TakesShortcuts(Streams(b"one ", b"two")))
    await serve.ask(client)
    assert client.body == b"one two"
    assert len(serve.passed) == 3
    assert LINE not in serve.passed[0]


async def test_a_router_waits_for_a_client_that_reads_nothing_and_others_do_not(landing: Landing) -> None:
    slow, quick, num_pieces = Client(stops_after=1), Client(), 2000
    streams = Streams(*[b"x" * 1000] * num_pieces)
    router = TakesShortcuts(streams)
    asking = asyncio.create_task(Serve(landing, router).ask(slow))
    await until(lambda: slow.messages)
    await asyncio.sleep(0.1)
    held = streams.num_taken
    await Serve(landing, TakesShortcuts(Streams(*[b"y"] * 50))).ask(quick)
    assert quick.body == b"y" * 50
    assert streams.num_taken == held < num_pieces
    assert sum(relay._num_bytes for relay in landing.relays.values()) < 8 * HIGH_BYTES
    slow.takes.set()
    await asking
    assert slow.body == b"x" * 1000 * num_pieces


async def test_where_the_connection_is_lost_the_router_is_told_and_the_response_has_no_end(landing: Landing) -> None:
    client, other = Client(stops_after=2), Client()
    streams = Streams(*[b"x" * 1000] * 2000)
    router = TakesShortcuts(streams)
    asking = asyncio.create_task(Serve(landing, router).ask(client))
    await until(lambda: len(client.messages) > 1)
    (line,) = landing.lines.values()
    line.close()
    await until(lambda: streams.error is not None)
    await asking  # without an end, so that the server closes the connection
    assert client.messages[-1]["more_body"]
    await Serve(landing, TakesShortcuts(Streams(b"a", b"b"))).ask(other)
    assert other.body == b"ab"


async def test_whoever_writes_without_a_pause_hears_of_a_lost_connection_by_the_next_piece(landing: Landing) -> None:
    client, num_taken = Client(), 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_taken
        await send(START)
        await send(piece(b"one "))
        await asyncio.sleep(0.01)
        (line,) = landing.lines.values()
        assert line._transport is not None
        with socket.socket(fileno=os.dup(line._transport.get_extra_info("socket").fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        with suppress(BrokenPipeError):
            while num_taken < 100:  # no turn of the loop between them
                await send(piece(b"x" * (MAX_PIECE + 1)))
                num_taken += 1

    await Serve(landing, TakesShortcuts(app)).ask(client)
    assert num_taken <= 1
    assert client.body == b"one "


async def test_a_long_piece_that_is_given_up_was_sent_whole_or_not_at_all(landing: Landing) -> None:
    client, long = Client(stops_after=2), b"x" * (40 * MAX_PIECE)
    given_up = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal given_up
        await send(START)
        await send(piece(b"one "))
        for _ in range(3):
            try:
                async with asyncio.timeout(0.05):
                    await send(piece(long))
            except TimeoutError:
                given_up += 1
        client.takes.set()
        await send(piece(b" end", is_last=True))

    async with asyncio.timeout(30):
        await Serve(landing, TakesShortcuts(app)).ask(client)
    assert given_up
    assert client.body == b"one " + long * (3 - given_up) + b" end"


async def test_a_router_that_closes_behind_its_last_piece_loses_nothing(landing: Landing) -> None:
    client, router = Client(), TakesShortcuts(Streams(b"a", b"b", b"c", b"d"))
    serve = Serve(landing, router, slow_s=0.05)
    asking = asyncio.create_task(serve.ask(client))
    await until(lambda: landing.lines)
    await asyncio.sleep(0.02)
    router.close()
    await asking
    assert client.body == b"abcd"
    assert not client.has_failed


async def test_a_proxy_that_does_not_answer_in_time_is_tried_again(
    landing: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortcut_start, "CONNECT_TIMEOUT_S", 0.02)
    monkeypatch.setattr(shortcut_start, "AGAIN_S", 0.05)
    name, landing.name = landing.name, "1" * 16
    router, ends = TakesShortcuts(Streams(b"a", b"b")), []

    async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(await reader.read())  # until the other side closes it
        writer.close()

    silent = await asyncio.start_unix_server(says_nothing, path_of(landing.name))
    client = Client()
    await Serve(landing, router).ask(client)
    assert client.body == b"ab"
    await until(lambda: ends)
    silent.close()
    assert name is not None
    os.replace(path_of(name), path_of(landing.name))
    await until(lambda: not router._lines)
    again = Client()
    serve = Serve(landing, router)
    await serve.ask(again)
    assert again.body == b"ab"
    assert LINE in serve.passed[0]


async def test_of_many_proxies_those_that_lead_nowhere_are_forgotten_first(landing: Landing) -> None:
    router = TakesShortcuts(Streams(b"a", b"b"))
    await Serve(landing, router).ask(Client())
    (line,) = landing.lines.values()
    own, numbers = landing.name, range(MAX_PROXIES + 3)
    for number in numbers:
        landing.name = f"{number:016x}"
        await Serve(landing, router).ask(Client())
    landing.name = own
    await Serve(landing, router).ask(Client())
    assert list(landing.lines.values()) == [line]
    assert len(router._lines) == MAX_PROXIES


async def test_a_line_that_is_forgotten_is_closed_behind_the_last_of_its_responses(landing: Landing) -> None:
    client = Client(stops_after=2)
    router = TakesShortcuts(Streams(*[b"x" * 1000] * 500))
    asking = asyncio.create_task(Serve(landing, router).ask(client))
    await until(lambda: len(client.messages) > 1)
    (name,) = router._lines
    router._forget_one()
    client.takes.set()
    await asking
    assert client.body == b"x" * 500_000
    await until(lambda: not landing.lines)
    assert name not in router._lines


async def test_an_end_behind_lost_pieces_is_no_end(landing: Landing) -> None:
    client = Client()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(piece(b"one"))
        (line,) = landing.lines.values()
        line.close()
        await send(piece(b"end", is_last=True))

    with pytest.raises(ShortcutLost):
        await Serve(landing, TakesShortcuts(app), slow_s=0.05).ask(client)
    assert client.has_failed
    assert client.body == b""


async def test_after_a_lost_connection_there_is_another(landing: Landing) -> None:
    router, first, second, third = TakesShortcuts(Streams(b"a", b"b")), Client(), Client(), Client()
    await Serve(landing, router).ask(first)
    (line,) = landing.lines.values()
    line.close()
    await until(lambda: not landing.lines)
    await asyncio.sleep(0.01)
    await Serve(landing, router).ask(second)
    await Serve(landing, router).ask(third)
    assert first.body == second.body == third.body == b"ab"
    assert len(landing.lines) == 1


async def test_of_a_client_that_has_left_pieces_are_dropped(landing: Landing) -> None:
    left, stays = Client(), Client()
    goes_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(piece(b"one "))
        await goes_on.wait()
        await send(piece(b"two "))
        await send(piece(b"three", is_last=True))

    router = TakesShortcuts(app)
    asking = [asyncio.create_task(Serve(landing, router).ask(client)) for client in (left, stays)]
    await until(lambda: left.body and stays.body)
    asking[0].cancel()
    await asyncio.gather(asking[0], return_exceptions=True)
    goes_on.set()
    await asking[1]
    assert (left.body, stays.body) == (b"one ", b"one two three")


async def test_pieces_under_a_number_that_nobody_gave_reach_nobody(landing: Landing) -> None:
    client = Client()
    goes_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(piece(b"one "))
        await goes_on.wait()
        await send(piece(b"two", is_last=True))

    asking = asyncio.create_task(Serve(landing, TakesShortcuts(app)).ask(client))
    await until(lambda: client.body)
    assert landing.name is not None
    _, writer = await asyncio.open_unix_connection(path_of(landing.name))
    writer.write(b"h" * 16 + b"".join(framed(b"\x00" * 16, b"forged")))
    await writer.drain()
    await until(lambda: b"h" * 16 in landing.lines)
    writer.close()
    goes_on.set()
    await asking
    assert client.body == b"one two"


async def test_what_a_client_says_of_shortcuts_is_taken_away() -> None:
    class Noting(Echo):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            self.seen = [value for name, value in scope["headers"] if name == HEADER]
            await super().__call__(scope, receive, send)

    lie = HOST + b"X-Serve-App-Shortcut: 0123456789abcdef:" + b"00" * 16 + b"\r\nContent-Length: 2\r\n\r\n{}"
    for request in (b"POST /v1/completions HTTP/1.1\r\n", b"POST /v1/chat/completions HTTP/1.1\r\n"):
        app, turnstile = Noting(), Busy()
        turnstile.make_room()
        await Line(turnstile, app).send_all(request + lie)
        assert app.seen == []
    app = Noting()
    await Line(Busy(), app).send_all(b"GET /health HTTP/1.1\r\n" + lie)
    assert app.seen == []


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"../../etc:" + b"0" * 32,
        b"0123456789abcdef",
        b"0123456789abcdef:" + b"0" * 33,
        b"0123456789ABCDEF:" + b"0" * 32,
    ],
)
def test_an_offer_that_is_none_is_ignored(value: bytes) -> None:
    assert offered({"headers": [(HEADER, value)]}) is None


def test_two_offers_are_none() -> None:
    offer = (HEADER, b"0123456789abcdef:" + b"0" * 32)
    assert offered({"headers": [offer]}) == ("0123456789abcdef", bytes(16))
    assert offered({"headers": [offer, offer]}) is None


@pytest.mark.parametrize("size", [1, 7, 20, 21, 1000])
def test_frames_are_read_however_they_are_cut(size: int) -> None:
    pieces = [(bytes([number]) * 16, b"p" * number) for number in range(1, 30)]
    sent = b"".join(frame for number, body in pieces for frame in framed(number, body))
    frames = Frames()
    read = [each for at in range(0, len(sent), size) for each in frames.add(sent[at : at + size])]
    assert read == pieces
    assert len(sent) == sum(HEAD.size + len(body) for _, body in pieces)


async def test_a_folder_that_others_may_reach_into_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder().mkdir(mode=0o755)
    landing = Landing()
    await landing.open()
    assert landing.name is None
    client = Client()
    await Serve(landing, TakesShortcuts(Streams(b"a", b"b"))).ask(client)
    assert client.body == b"ab"


async def test_sockets_that_were_left_behind_are_removed(landing: Landing) -> None:
    with socket.socket(socket.AF_UNIX) as abandoned, socket.socket(socket.AF_UNIX) as new:
        abandoned.bind(path_of("abandoned"))
        new.bind(path_of("new"))
    long_ago = os.stat(path_of("new")).st_mtime - 2 * ABANDONED_S
    assert landing.name is not None
    for name in ("abandoned", landing.name):
        os.utime(path_of(name), (long_ago, long_ago))
    another = Landing()
    await another.open()
    assert another.name is not None
    assert sorted(path.stem for path in folder().iterdir()) == sorted(["new", landing.name, another.name])
    another.close()
    assert {path.stem for path in folder().iterdir()} == {"new", landing.name}
