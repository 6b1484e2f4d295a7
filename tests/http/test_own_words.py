"""What a proxy says where Serve says something by itself, or nothing: an error as any other."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.http.own_words import Beginning, InOurWords
from tests.http.full_proxy import COUNTED, HOST, Busy, Line, post


class Says:
    """A server of which so much is heard; fails: behind it"""

    def __init__(self, *messages: Message, fails: bool = False) -> None:
        self.messages = messages
        self.fails = fails

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        for message in self.messages:
            await send(message)
        if self.fails:
            raise RuntimeError("it fails")


def serves(status: int) -> tuple[Message, Message]:
    """As Serve itself answers."""
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [[b"content-type", b"text/plain; charset=utf-8"]],
    }
    return start, {"type": "http.response.body", "body": b"a text of Serve's"}


async def answer(app: Any, headers: bytes = b"") -> tuple[int, dict[bytes, bytes], bytes]:
    turnstile = Busy(max_requests=2)
    turnstile.make_room()
    written = await Line(turnstile, app).send_all(post(headers + COUNTED))
    head, _, body = written.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert turnstile.num_inside == len(turnstile.guests)
    return int(lines[0].split()[1]), dict(line.lower().split(b": ", 1) for line in lines[1:]), body


@pytest.mark.parametrize(
    ("app", "status", "code", "retry_after"),
    [
        (Says(*serves(503)), 503, "overloaded", b"2"),
        (Says(*serves(429)), 503, "overloaded", b"2"),
        (Says(*serves(408)), 504, "deadline_exceeded", None),
        (Says(*serves(500)), 503, "unavailable", b"1"),
        (Says(), 503, "unavailable", b"1"),
        (Says(fails=True), 503, "unavailable", b"1"),
    ],
    ids=["full", "full by another number", "too late", "failed", "silent", "broken"],
)
async def test_what_serve_says_by_itself_is_an_error_as_any_other(
    app: Says, status: int, code: str, retry_after: bytes | None
) -> None:
    found, headers, body = await answer(app)
    assert (found, json.loads(body)["error"]["error_code"]) == (status, code)
    assert headers.get(b"retry-after") == retry_after
    assert (headers[b"x-request-id"], headers[b"content-length"]) == (b"mine", b"%d" % len(body))
    _, headers, body = await answer(app, b"X-Completions-Dialect: openai\r\n")
    assert (json.loads(body)["error"]["code"], headers[b"x-completions-dialect"]) == (code, b"openai")


@pytest.mark.parametrize("status", [200, 400, 404])
async def test_what_is_no_failure_of_serves_is_passed_on(status: int) -> None:
    found, _, body = await answer(Says(*serves(status)))
    assert found == status
    assert b"a text of Serve's" in body


class Routed:
    """Serve with these routes, none of which has an application that answers; None while it knows no route yet."""

    def __init__(self, routes: dict[str, str] | None) -> None:
        self.routes = routes
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        status, kind, body = 404, b"text/plain", b"Path not found. Ping http://.../-/routes for available routes."
        if scope["path"] == "/-/routes":
            status, body = (503, b"Route table is not populated yet.") if self.routes is None else (200, b"")
            kind, body = (
                (kind, body) if self.routes is None else (b"application/json", json.dumps(self.routes).encode())
            )
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/nowhere", b"/-/routes"])
@pytest.mark.parametrize("routes", [None, {}], ids=["starting", "stopping"])
async def test_while_no_application_has_a_route_every_address_answers_503(
    path: bytes, routes: dict[str, str] | None
) -> None:
    turnstile = Busy(max_requests=2)
    written = await Line(turnstile, Routed(routes)).send_all(b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    head, _, body = written.partition(b"\r\n\r\n")
    assert b" 503 " in head
    assert b"\r\nretry-after: 2" in head.lower()
    assert json.loads(body)["error"]["error_code"] == "unavailable"
    found, headers, body = await answer(Routed(routes), b"X-Completions-Dialect: openai\r\n")
    assert (found, json.loads(body)["error"]["code"], headers[b"retry-after"]) == (503, "unavailable", b"2")


async def test_an_application_without_a_replica_keeps_nobody_waiting_at_the_start() -> None:
    has_replica, beginning = asyncio.Event(), Beginning()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/-/routes":
            await Routed({"/": "router"})(scope, receive, send)
            return
        await has_replica.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def status() -> int:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request"}

        async def send(message: Message) -> None:
            sent.append(message)

        await InOurWords(app, beginning)({"type": "http", "path": "/v1/models", "headers": []}, receive, send)
        return int(sent[0]["status"])

    assert await asyncio.wait_for(asyncio.gather(status(), status()), 30) == [503, 503]
    waiting = asyncio.gather(status(), status(), status())
    await asyncio.sleep(0)
    has_replica.set()
    assert await waiting == [200, 200, 200], "all who wait for the first answer"
    assert beginning.is_over


async def test_beside_other_routes_an_address_without_one_is_a_404_of_ours_and_one_with_it_is_theirs() -> None:
    found, _, body = await answer(Routed({"/other": "other"}))
    assert (found, json.loads(body)["error"]["error_code"]) == (404, "not_found")
    found, _, body = await answer(Routed({"/": "router"}))
    assert (found, b"Ping" in body) == (404, True)


async def test_nobody_is_told_of_serves_applications() -> None:
    app = Routed({"/": "router"})
    await Line(Busy(max_requests=2), app).send_all(b"GET /-/routes HTTP/1.1\r\n" + HOST + b"\r\n")
    assert app.asked[0] == "/-/routes/", "the router is asked, as for any address"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-type", b"application/json")],
        [(b"content-type", b"text/plain"), (b"x-completions-dialect", b"union")],
    ],
)
async def test_what_an_application_says_of_its_failures_is_passed_on(headers: list[tuple[bytes, bytes]]) -> None:
    start = {"type": "http.response.start", "status": 503, "headers": [*headers, (b"content-length", b"2")]}
    found, _, body = await answer(Says(start, {"type": "http.response.body", "body": b"{}"}))
    assert (found, body) == (503, b"{}")


async def test_a_response_that_breaks_off_is_not_continued() -> None:
    start = {"type": "http.response.start", "status": 200, "headers": []}
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    app = InOurWords(Says(start, {"type": "http.response.body", "body": b"a", "more_body": True}, fails=True))
    with pytest.raises(RuntimeError):
        await app({"type": "http", "headers": []}, receive, send)
    assert [message.get("body") for message in sent] == [None, b"a"]
