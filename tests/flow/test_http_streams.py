"""Streams while they run: what is sent when, and what happens when one side leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest
from starlette.types import ASGIApp, Message

from serve_app.core.errors import EngineFailed
from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import RunSettings
from tests.fakes import FakeBackend, settle

BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "stream": True}


class Connection:
    """One request over ASGI, by hand: what is received is fed, what is sent is kept."""

    def __init__(self, app: ASGIApp, body: bytes, *, is_complete: bool = True) -> None:
        self.sent: list[Message] = []
        self.is_broken = False
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": not is_complete})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        await self.may_send.wait()
        if self.is_broken:
            raise ConnectionResetError("the client has gone")
        self.sent.append(message)

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def texts(self) -> list[str]:
        """Of every chunk so far."""
        events = self.body.decode().split("\n\n")[:-1]
        payloads = [event.removeprefix("data: ") for event in events if event != "data: [DONE]"]
        return [json.loads(payload)["choices"][0]["text"] for payload in payloads]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(is_stepped=True)


@pytest.fixture
async def app(backend) -> AsyncIterator[ASGIApp]:
    fleet = Fleet("router-0")
    fleet.put(backend.card, backend)
    yield build_app(Router(fleet, RouterConfig(run=RunSettings(max_pause_s=0.0))))
    await fleet.close()


def connect(app: ASGIApp, **change: object) -> Connection:
    return Connection(app, json.dumps(BODY | change).encode())


async def test_the_status_line_waits_for_the_first_token(app, backend):
    connection = connect(app)
    await settle()
    assert (connection.sent, backend.num_live) == ([], 1)
    backend.step()
    await settle()
    assert connection.status == 200
    assert connection.texts == [" p0s0w0"]
    for _ in range(3):
        backend.step()
    await connection.task
    assert connection.texts == [f" p0s0w{w}" for w in range(4)]
    assert connection.body.endswith(b"data: [DONE]\n\n")
    assert connection.sent[-1]["more_body"] is False


async def test_each_step_is_sent_at_once_and_steps_that_wait_go_out_together(app, backend):
    connection = connect(app, n=2)
    await settle()
    backend.step()
    await settle()
    assert len(connection.sent) == 2, "the status line and one piece with the chunks of both choices"
    assert len(connection.texts) == 2
    backend.step()
    backend.step()
    await settle()
    assert len(connection.texts) == 6
    connection.leave()
    await connection.task


async def test_a_failure_before_the_first_token_is_an_http_status(app, backend):
    connection = connect(app)
    await settle()
    for _ in range(2):  # once is not told
        backend.fail(EngineFailed("The engine failed."))
        await settle()
    await asyncio.wait_for(connection.task, 60)
    assert connection.status == 500
    assert json.loads(connection.body)["error"]["error_code"] == "engine_failed"


async def test_a_failure_after_the_first_token_is_an_event_and_the_stream_is_closed(app, backend):
    connection = connect(app)
    await settle()
    backend.step()
    await settle()
    backend.step()
    backend.die(ConnectionResetError("gone"))
    await connection.task
    assert connection.status == 200
    *chunks, error, done, rest = connection.body.decode().split("\n\n")
    assert len(chunks) == 2, "what came before the failure is shown"
    assert json.loads(error.removeprefix("data: "))["error"]["error_code"] == "model_loading"
    assert (done, rest) == ("data: [DONE]", "")
    assert connection.sent[-1]["more_body"] is False


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
async def test_a_client_that_leaves_ends_every_sequence(app, backend, caplog, stream, num_steps):
    caplog.set_level(logging.INFO, logger="serve_app.http.completions")
    connection = connect(app, prompt=["a", "b"], n=2, stream=stream)
    await settle()
    for _ in range(num_steps):
        backend.step()
        await settle()
    assert backend.num_live == 4
    connection.leave()
    await asyncio.wait_for(connection.task, 60)
    await settle()
    assert backend.num_live == 0
    assert len(backend.aborted) == 2
    assert b"[DONE]" not in connection.body
    assert [json.loads(record.message)["status"] for record in caplog.records] == [499]


async def test_a_client_that_leaves_while_its_request_is_submitted_leaves_nothing_behind(app, backend):
    backend.submit_gate.clear()
    connection = connect(app)
    await settle()
    connection.leave()
    await asyncio.wait_for(connection.task, 60)
    backend.submit_gate.set()
    await settle()
    assert (len(backend.submissions), backend.num_live) == (1, 0)


@pytest.mark.parametrize("change", [{}, {"temperature": 9}, {"n": 2}])
async def test_a_server_that_cannot_send_ends_the_request_quietly(app, backend, change):
    connection = connect(app, **change)
    connection.is_broken = True
    await settle()
    backend.step()
    await asyncio.wait_for(connection.task, 60)
    await settle()
    assert backend.num_live == 0


async def test_a_cancelled_application_ends_every_sequence(app, backend):
    connection = connect(app, n=3)
    await settle()
    backend.step()
    await settle()
    connection.task.cancel()
    await asyncio.wait([connection.task])
    await settle()
    assert connection.task.cancelled()
    assert backend.num_live == 0


async def test_a_client_that_leaves_before_its_body_is_complete_is_not_answered(app, backend):
    connection = Connection(app, b'{"mod', is_complete=False)
    connection.leave()
    await connection.task
    assert connection.sent == []


async def test_a_client_that_leaves_after_the_end_changes_nothing(app, backend, caplog):
    caplog.set_level(logging.INFO, logger="serve_app.http.completions")
    connection = connect(app, max_tokens=1)
    await settle()
    backend.step()
    await connection.task
    connection.leave()
    await settle()
    assert backend.aborted == []
    assert [json.loads(record.message)["status"] for record in caplog.records] == [200]


async def test_a_client_that_reads_slowly_gets_everything_in_order(app, backend):
    connection = connect(app, max_tokens=30)
    await settle()
    connection.may_send.clear()
    for _ in range(15):
        backend.step()
    await settle()
    for _ in range(15):
        backend.step()
    await settle()
    assert connection.sent == []
    connection.may_send.set()
    await connection.task
    assert connection.texts == [f" p0s0w{w}" for w in range(30)]
    assert len(connection.sent) < 10, "what waited was sent together"
