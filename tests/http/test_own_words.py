"""What a proxy says where Serve says something by itself, or nothing: an error as any other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.http.own_words import InOurWords
from tests.http.full_proxy import COUNTED, Busy, Line, post


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
