"""An application on a port, in a thread and an event loop of its own, that can be lost and come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import uvicorn
from starlette.types import ASGIApp

from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend
from tests.flow.stack import running_stack
from tests.ports import held_port

TIMEOUT_S = 120
Result = TypeVar("Result")
Building = Callable[[], AbstractAsyncContextManager[ASGIApp]]


class Served:
    """Serves on a port of the kernel's choice, the same one after it was lost."""

    def __init__(self, building: Building) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._context = building()
        self._app = self.run(self._context.__aenter__())
        self._holding = held_port()
        self.port = self._holding.__enter__()
        self.come_back()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, waiting: Awaitable[Result]) -> Result:
        """What it gives, in the loop of the service."""

        async def waited() -> Result:
            return await waiting

        return asyncio.run_coroutine_threadsafe(waited(), self._loop).result(TIMEOUT_S)

    def call(self, act: Callable[[], Result]) -> Result:
        async def acted() -> Result:
            return act()

        return self.run(acted())

    def come_back(self) -> None:
        self.run(self._begin())

    def be_lost(self) -> None:
        """Every connection is closed at once, and the port refuses."""
        self.run(self._end())

    def close(self) -> None:
        self.be_lost()
        self.run(self._context.__aexit__(None, None, None))
        self._holding.__exit__(None, None, None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    async def _begin(self) -> None:
        config = uvicorn.Config(self._app, port=self.port, lifespan="off", log_config=None, timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._serving = asyncio.ensure_future(self._server.serve())
        while not self._server.started:
            assert not self._serving.done(), "the port was taken meanwhile"
            await asyncio.sleep(0.01)

    async def _end(self) -> None:
        self._server.force_exit = True
        self._server.should_exit = True
        await self._serving
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


@asynccontextmanager
async def engine() -> AsyncIterator[ASGIApp]:
    """The embedded model with its adapters, computed."""
    async with running_stack(num_replicas=1, threads=1, max_num_sequences=8) as stack:
        yield stack.app


def reciting(*backends: FakeBackend, given: Fleet | None = None) -> Building:
    """The application over backends in memory. given: a fleet that a test changes later"""

    @asynccontextmanager
    async def built() -> AsyncIterator[ASGIApp]:
        fleet = given or Fleet("router-0")
        for backend in backends:
            fleet.put(backend.card, backend)
        yield build_app(Router(fleet))
        await fleet.close()

    return built
