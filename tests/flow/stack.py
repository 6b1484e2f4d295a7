"""The whole house in one process: HTTP application, router, and replicas with the real engine; no Ray."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.loading import load_service
from serve_app.http.app import build_app
from serve_app.http.guard import OPEN_DOOR, Door
from serve_app.http.settings import HttpSettings
from serve_app.replica.service import ModelService
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from tests.engine.harness import core_of

ROUTER_ID = "router-0"
ENGINE = os.environ.get("SERVE_APP_TEST_ENGINE", "own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """app: the ASGI application;  services: the replicas behind it;  fleet: those as the router knows them"""

    app: ASGIApp
    services: list[ModelService]
    fleet: Fleet

    async def post(
        self,
        body: dict[str, Any],
        path: str = "/v1/completions",
        *,
        dialect: str | None = None,
        key: str | None = None,
    ) -> httpx.Response:
        headers = {} if dialect is None else {"X-Completions-Dialect": dialect}
        headers |= {} if key is None else {"x-api-key": key}
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://flow") as client:
            return await client.post(path, json=body, headers=headers, timeout=60)

    async def get(self, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://flow") as client:
            return await client.get(path)

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post({"model": "demo", "temperature": 0, **body})
        assert response.status_code == 200, response.text
        parsed: dict[str, Any] = response.json()
        return parsed

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, `[DONE]` checked and left out."""
        response = await self.post({"model": "demo", "temperature": 0, "stream": True, **body})
        assert response.status_code == 200, response.text
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    async def greet(self) -> None:
        """Have the router hear what its replicas say of themselves, as it does once a second where it looks."""
        for service in self.services:
            self.fleet.put(await service.hello(ROUTER_ID), service)

    async def settled(self) -> None:
        """Wait until no replica has work and every block is free."""
        async with asyncio.timeout(30):
            while any(core_of(service).has_work for service in self.services):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for service in self.services:
            load = core_of(service).load
            assert (load.num_running, load.num_waiting) == (0, 0)
            assert load.num_free_blocks == load.num_blocks
            assert service.num_open == 0


@asynccontextmanager
async def running_stack(
    *,
    num_replicas: int = 2,
    config: RouterConfig | None = None,
    settings: HttpSettings | None = None,
    door: Door = OPEN_DOOR,
    **changes: Any,
) -> AsyncIterator[Stack]:
    """Serve the embedded model and its adapters from so many replicas; of vLLM from one, as it has one in a process."""
    arguments = ModelArgs(
        **{
            "name": "demo",
            "path": "builtin:demo",
            "adapters": "adapters/demo",
            "dtype": "float32",
            "kv_cache_bytes": 64 << 20,
            "lease_s": 600,  # nobody renews it here
            "engine": ENGINE,
            **({"vllm": {"enforce_eager": True}} if ENGINE == "vllm" else {}),  # or each stack would be compiled
            **changes,
        }
    )
    fleet = Fleet(ROUTER_ID)
    services = []
    for number in range(1 if ENGINE == "vllm" else num_replicas):
        service = await asyncio.to_thread(load_service, arguments, f"replica-{number}")
        service.start()
        services.append(service)
        fleet.put(await service.hello(ROUTER_ID), service)
    try:
        yield Stack(app=build_app(Router(fleet, config), settings, door=door), services=services, fleet=fleet)
    finally:
        await fleet.close()
        for service in services:
            await service.close()


@dataclass(slots=True)
class HandDrivenClient:
    """A client that reads a response message by message and can leave at any moment."""

    app: ASGIApp
    body: dict[str, Any]
    messages: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    _is_sent: bool = False

    async def run(self) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1), "server": ("flow", 80),
        }  # fmt: skip
        await self.app(scope, self._receive, self.messages.put)

    async def _receive(self) -> Message:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}
