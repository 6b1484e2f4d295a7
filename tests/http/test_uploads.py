"""Long bodies are taken in one after the other, short ones at once; nobody waits for who sends slowly or is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.http import uploads as uploads_module
from serve_app.http.enclosed import HEADER
from serve_app.http.turnstile import Turnstile
from serve_app.http.uploads import LONG_BYTES, Uploads
from tests.http.full_proxy import HOST, Echo, Line, settle, statuses

LONG = [(b"content-length", b"%d" % (LONG_BYTES + 1))]
SHORT = [(b"content-length", b"%d" % LONG_BYTES)]
CHUNKED = [(b"transfer-encoding", b"chunked")]
START: Message = {"type": "http.response.start", "status": 200, "headers": []}


class Request:
    """One that an application has been asked, or waits to be."""

    def __init__(self, uploads: Uploads, headers: Iterable[tuple[bytes, bytes]] = LONG) -> None:
        self.is_asked = False
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.received: list[Message] = []
        self._goes_on = asyncio.Event()
        scope: Scope = {"type": "http", "headers": list(headers)}
        self.task = asyncio.create_task(uploads.in_turn(self._app)(scope, self.messages.get, self._sent))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As Serve's, which asks at once for what comes behind the body."""
        self.is_asked = True
        receiving = asyncio.create_task(self._receive_all(receive))
        try:
            await self._goes_on.wait()
            await send(START)
            await asyncio.Event().wait()  # until it is cancelled: a long answer
        finally:
            receiving.cancel()

    async def _receive_all(self, receive: Receive) -> None:
        while not self.received or self.received[-1]["type"] != "http.disconnect":
            self.received.append(await receive())

    async def _sent(self, message: Message) -> None:
        pass

    def piece(self, *, is_last: bool = False) -> None:
        self.messages.put_nowait({"type": "http.request", "body": b"x", "more_body": not is_last})

    def answer(self) -> None:
        self._goes_on.set()

    async def give_up(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until_asked(request: Request) -> None:
    async with asyncio.timeout(10):
        while not request.is_asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's turn ends by time."""
    monkeypatch.setattr(uploads_module, "STALL_S", 1000.0)
    monkeypatch.setattr(uploads_module, "ANSWER_S", 1000.0)


@pytest.mark.usefixtures("patient")
async def test_the_next_ones_turn_begins_when_something_is_said_of_the_one_before() -> None:
    uploads = Uploads()
    requests = [Request(uploads) for _ in range(5)]
    for number, request in enumerate(requests):
        await settle()
        assert [each.is_asked for each in requests] == [True] * (number + 1) + [False] * (4 - number)
        request.piece()
        request.piece(is_last=True)
        await settle()
        assert len(request.received) == 2
        request.answer()
    later = Request(uploads)
    await settle()
    assert later.is_asked
    for request in (*requests, later):
        await request.give_up()


@pytest.mark.usefixtures("patient")
async def test_what_is_short_waits_for_nobody_and_what_may_be_long_does() -> None:
    uploads = Uploads()
    first = Request(uploads)
    others = [Request(uploads, headers) for headers in (SHORT, [], [*CHUNKED, (HEADER, b"{}")], CHUNKED, LONG)]
    await settle()
    assert [each.is_asked for each in others] == [True, True, True, False, False]
    for request in (first, *others):
        await request.give_up()


@pytest.mark.usefixtures("patient")
async def test_whoever_has_gone_is_waited_for_no_more() -> None:
    uploads = Uploads()
    requests = [Request(uploads) for _ in range(6)]
    await settle()
    await requests[1].give_up()  # while it waits
    requests[0].messages.put_nowait({"type": "http.disconnect"})
    await until_asked(requests[2])
    requests[2].task.cancel()  # when it was asked
    await until_asked(requests[3])
    requests[3].piece(is_last=True)
    requests[3].answer()
    requests[4].task.cancel()  # in the moment in which its turn begins
    await until_asked(requests[5])
    assert not requests[1].is_asked
    for request in requests:
        await request.give_up()
    assert not uploads._turns.locked()


async def test_a_body_that_is_whole_has_longer_for_an_answer_than_a_piece_has_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads_module, "ANSWER_S", 1000.0)
    uploads = Uploads()
    first, other = Request(uploads), Request(uploads)
    first.piece(is_last=True)
    await asyncio.sleep(3 * uploads_module.STALL_S)
    assert not other.is_asked
    first.answer()
    await until_asked(other)
    for request in (first, other):
        await request.give_up()


async def test_nobody_waits_for_an_application_that_does_not_ask_for_the_body() -> None:
    async def asks_for_nothing(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    uploads, empty = Uploads(), asyncio.Queue[Message]()
    scope: Scope = {"type": "http", "headers": LONG}
    asking = asyncio.create_task(uploads.in_turn(asks_for_nothing)(scope, empty.get, empty.put))
    await settle()
    other = Request(uploads)
    await until_asked(other)
    asking.cancel()
    await other.give_up()


@pytest.mark.parametrize("pieces", [0, 1])
async def test_who_sends_slowly_has_had_its_turn_and_is_read_on(pieces: int) -> None:
    uploads = Uploads()
    slow, other = Request(uploads), Request(uploads)
    for _ in range(pieces):
        slow.piece()
    await until_asked(other)
    slow.piece()
    slow.piece(is_last=True)
    await settle()
    assert len(slow.received) == pieces + 2
    third = Request(uploads)
    other.piece(is_last=True)
    await until_asked(third)  # of the second nothing is said either
    for request in (slow, other, third):
        await request.give_up()


@pytest.mark.usefixtures("patient")
async def test_where_an_application_fails_the_next_ones_turn_begins() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("it fails")

    async def no(*_: Any) -> Any:
        raise AssertionError("nothing is received or sent")

    uploads = Uploads()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="it fails"):
            await uploads.in_turn(fails)({"type": "http", "headers": LONG}, no, no)


@pytest.mark.usefixtures("patient")
async def test_of_two_connections_both_are_answered() -> None:
    body = b'{"model": "demo", "prompt": "' + b"x" * LONG_BYTES + b'"}'
    app, turnstile = Echo(), Turnstile()
    app.may_answer.clear()
    uploading = Line(turnstile, app), Line(turnstile, app)
    for line in uploading:
        line.send(b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(body))
    for start in range(0, len(body), 60000):
        for line in uploading:
            line.send(body[start : start + 60000])
            await settle()
        assert app.num_asked == 1
    app.may_answer.set()
    async with asyncio.timeout(10):
        while not all(line.wire.written.endswith(body) for line in uploading):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert [statuses(line.wire.written) for line in uploading] == [[200], [200]]
    assert app.num_asked == 2
