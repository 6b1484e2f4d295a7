"""A service on a port of this machine, over a backend that recites; and the command line asked about it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.cli import main
from serve_app.cli.screen import KEY_VARIABLES, URL_VARIABLE
from serve_app.http.app import build_app
from serve_app.http.guard import OPEN_DOOR, Door
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card

WAIT_S = 60.0
TEMPLATE = "{{ messages }}"


@dataclass(slots=True)
class Recorded:
    """An application that notes the bodies that come."""

    app: ASGIApp
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted() -> Any:
            message = await receive()
            if message.get("body"):
                self.bodies.append(json.loads(message["body"]))
            return message

        if scope["type"] == "http":
            self.headers.append(dict(scope["headers"]))
        await self.app(scope, noted, send)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """url: where it answers;  recorded: what it was asked;  backend: the replica"""

    url: str
    recorded: Recorded
    backend: FakeBackend

    @property
    def asked(self) -> Any:
        """The body of the last request that had one."""
        return self.recorded.bodies[-1]


@contextmanager
def serving(door: Door = OPEN_DOOR, *, adapters_root: str = "") -> Iterator[Served]:
    """Serve `demo` with the adapters `pirate` and `shout` until the block ends; others may lie below the root."""
    card = model_card("demo", adapter_card("pirate"), adapter_card("shout"))
    backend = FakeBackend(replica_card("replica-0", replace(card, chat_template=TEMPLATE, adapters_root=adapters_root)))
    fleet = Fleet("router-0")
    recorded = Recorded(build_app(Router(fleet), door=door))
    server = uvicorn.Server(uvicorn.Config(recorded, port=0, lifespan="off", log_level="error"))

    async def serve() -> None:
        fleet.put(backend.card, backend)
        await server.serve()
        await fleet.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(url=f"http://127.0.0.1:{port}", recorded=recorded, backend=backend)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command line came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class CommandLine:
    """Runs commands as a person would, about one service."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        for name in KEY_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(URL_VARIABLE, url)
        monkeypatch.setenv("COLUMNS", "100")

    def __call__(self, *words: str) -> Ran:
        self._capsys.readouterr()
        code = main(list(words))
        seen = self._capsys.readouterr()
        return Ran(code=code, out=seen.out, err=seen.err)
