"""Bare Serve applications that stream what is written already: what Serve itself takes for a token, at least.

`one` streams from the deployment behind the proxy, `two` from a second one, whose pieces the first hands on. Neither
parses, counts or checks anything. Deployed by `bench_transport.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import Receive, Scope, Send

CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1763820000,'
    b'"model":"bench-tiny","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,'
    b'"matched_stop":null}]}\n\n'
)
"""As long as one of ours."""
DONE = b"data: [DONE]\n\n"
NAMES = ("one", "two")

Pieces = Callable[[int, float], AsyncIterator[bytes]]


class Pace:
    """Has all streams of a process wait for the same moments, as those of an engine wait for its steps."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    async def wait(self, period_s: float) -> None:
        """Until the next moment, `period_s` behind the one before where that is still to come."""
        if not period_s:
            await asyncio.sleep(0)
            return
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_later(period_s, self._ring)
        await asyncio.shield(self._next)

    def _ring(self) -> None:
        assert self._next is not None
        self._next.set_result(None)
        self._next = None


class Streams:
    """What an ingress has behind it."""

    def __init__(self) -> None:
        self._pace = Pace()

    async def pieces(self, count: int, period_s: float) -> AsyncGenerator[bytes, None]:
        for _ in range(count):
            await self._pace.wait(period_s)
            yield CHUNK


class Door:
    """Raw ASGI: asks how much of what is wanted, and sends it piece by piece."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        body, is_whole = b"", False
        while not is_whole:
            message = await receive()
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
        asked = json.loads(body)
        count = asked["max_tokens"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        async for piece in self._pieces(count, asked.get("period_s", 0.0)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}}
        tail = b"data: " + json.dumps(usage).encode() + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": tail, "more_body": False})


async def _live(receive: Receive, send: Send) -> None:
    """Nothing is to be done when it starts, and nothing when it ends."""
    for _ in ("startup", "shutdown"):
        await send({"type": f"{(await receive())['type']}.complete"})


class Alone:
    def __init__(self) -> None:
        self._door = Door(Streams().pieces)

    def __serve_build_asgi_app__(self) -> Door:
        return self._door


class Before:
    """model: a deployment of Streams"""

    def __init__(self, model: DeploymentHandle[Any]) -> None:
        streaming = model.options(method_name="pieces", stream=True)
        self._door = Door(streaming.remote)

    def __serve_build_asgi_app__(self) -> Door:
        return self._door


def _deployed(kind: type[Any], **options: Any) -> Any:
    return serve.deployment(kind, max_ongoing_requests=512, ray_actor_options={"num_cpus": 0}, **options)


one = _deployed(serve.ingress()(Alone), name="Alone").bind()
two = _deployed(serve.ingress()(Before), name="Before").bind(_deployed(Streams, name="Streams").bind())


def applications() -> list[dict[str, Any]]:
    """As a cluster file has them, each below a path of its name."""
    return [
        {"name": name, "route_prefix": f"/{name}", "import_path": f"benchmarks.bare_serve:{name}"} for name in NAMES
    ]
