"""Our own clients fetch the rest of a stream that breaks off, from whichever router answers, and show it once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial
from itertools import cycle

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from serve_app.cli.client import Service
from serve_app.http.app import build_app
from serve_app.lab.wire import Wire
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend

ASKED = {"model": "tiny", "prompt": "one two", "max_tokens": 12}
WHOLE = "".join(f" p0s0w{at}" for at in range(12))


class Breaking:
    """Two routers in turn behind one address. Of the next answers so many messages get through each, then it breaks."""

    def __init__(self) -> None:
        self.backend = FakeBackend()
        self.fleets = [Fleet("router-0"), Fleet("router-1")]
        self.cuts: list[int] = []
        self.methods: list[str] = []
        self._apps = cycle([build_app(Router(fleet)) for fleet in self.fleets])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = self.cuts.pop(0) if self.cuts else 10_000
        self.methods.append(scope["method"])

        async def breaking(message: Message) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise ConnectionError("the router was killed")
            await send(message)

        await next(self._apps)(scope, receive, breaking)


@pytest.fixture
async def service() -> AsyncIterator[tuple[Breaking, str]]:
    breaking = Breaking()
    for fleet in breaking.fleets:
        fleet.put(breaking.backend.card, breaking.backend)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(breaking, http="h11", lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield breaking, f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await serving
    for fleet in breaking.fleets:
        await fleet.close()


async def test_the_command_line_shows_a_stream_once(service: tuple[Breaking, str]) -> None:
    breaking, url = service

    def read() -> str:
        return "".join(each["choices"][0]["text"] for each in Service(url=url).events("/v1/completions", ASKED))

    breaking.cuts = [4, 2, 3]
    assert await asyncio.to_thread(read) == WHOLE
    assert breaking.methods == ["POST", "GET", "GET", "GET"]


async def test_the_command_line_asks_again_where_nobody_had_begun() -> None:
    bodies: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append((await reader.readuntil(b"}")).rpartition(b"\r\n")[2])
        if len(bodies) > 1:
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\nconnection: close\r\n\r\n{"choices": []}')
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    ask = partial(Service(url=url).json, "/v1/completions", ASKED, member="choices")
    assert await asyncio.to_thread(ask) == {"choices": []}
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]
    server.close()


async def test_the_notebooks_client_shows_a_stream_once(service: tuple[Breaking, str]) -> None:
    breaking, url = service
    breaking.cuts = [4, 2, 3]
    wire = Wire(url, "none")
    chunks = [chunk async for chunk in wire.chunks("completions", ASKED)]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == WHOLE
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")] == [12]
    assert breaking.methods == ["POST", "GET", "GET", "GET"]
    breaking.cuts = [0]
    assert (await wire.answer("completions", ASKED)).body["choices"][0]["text"] == WHOLE
    await wire.close()
