"""Signs of life in a stream while nothing is there to be sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.types import ASGIApp

from serve_app.core.errors import EngineFailed, Overloaded
from serve_app.http.app import build_app
from serve_app.http.settings import HttpSettings
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend
from tests.flow.test_http_streams import Connection, connect, settle

COMMENT = ": keep-alive"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(is_stepped=True)


@pytest.fixture
async def app(backend) -> AsyncIterator[ASGIApp]:
    fleet = Fleet("router-0")
    fleet.put(backend.card, backend)
    yield build_app(Router(fleet), HttpSettings(keep_alive_s=0.01))
    await fleet.close()


async def sent(connection: Connection, num_messages: int) -> None:
    async with asyncio.timeout(60):
        while len(connection.sent) < num_messages:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_comments_go_out_while_a_prompt_is_computed_and_between_tokens(app, backend):
    connection = connect(app)
    await sent(connection, 3)
    assert connection.status == 200
    assert set(connection.body.decode().split("\n\n")) == {COMMENT, ""}
    backend.step()
    await settle()
    num_sent = len(connection.sent)
    await sent(connection, num_sent + 1)
    for _ in range(3):
        backend.step()
    await connection.task
    events = [event for event in connection.body.decode().split("\n\n")[:-1] if event != COMMENT]
    assert events.pop() == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert texts == [f" p0s0w{word}" for word in range(4)]


async def test_a_failure_after_a_comment_is_an_event(app, backend):
    connection = connect(app)
    await sent(connection, 2)
    backend.fail(EngineFailed("The engine failed."))  # nothing was shown: it is tried once more
    await settle()
    await sent(connection, len(connection.sent) + 1)
    backend.fail(EngineFailed("The engine failed."))
    async with asyncio.timeout(60):
        await connection.task
    assert connection.status == 200
    events = [event for event in connection.body.decode().split("\n\n")[:-1] if event != COMMENT]
    assert json.loads(events[0].removeprefix("data: "))["error"]["error_code"] == "engine_failed"
    assert events[1:] == ["data: [DONE]"]


async def test_no_comment_goes_out_before_every_replica_has_accepted(app, backend):
    backend.submit_gate.clear()
    backend.refusal = Overloaded("Full.", None, {"retry_after_s": 2})
    connection = connect(app)
    await asyncio.sleep(0.05)
    assert connection.sent == []
    backend.submit_gate.set()
    await connection.task
    assert connection.status == 503
    assert (b"retry-after", b"2") in connection.sent[0]["headers"]


async def test_a_response_that_is_no_stream_gets_no_comments(app, backend):
    connection = connect(app, stream=False)
    await asyncio.sleep(0.05)
    assert connection.sent == []
    for _ in range(4):
        backend.step()
    await connection.task
    assert json.loads(connection.body)["choices"][0]["finish_reason"] == "length"


async def test_a_client_that_leaves_between_comments_ends_its_request(app, backend):
    connection = connect(app)
    await sent(connection, 2)
    connection.leave()
    await connection.task
    await settle()
    assert backend.num_live == 0
