"""Answers a request that comes again under its `Idempotency-Key` with the bytes of the first answer."""

from __future__ import annotations

import asyncio
from contextvars import Context

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.dialects.tables import HEADER
from serve_app.core.tenants import Identity
from serve_app.http.exchange import ClientGone, read_body
from serve_app.http.metrics import Served
from serve_app.router.replays import Recording, Replays, fingerprint_of

NAME = "idempotency-key"
FIRST = b"idempotency-replayed"


class Idempotent:
    """Around a route that computes. Without the header nothing is different.

    With it, the request is computed apart from whoever asked: a client that leaves and comes again, or comes twice,
    follows the one answer from its first byte, be it whole or a stream, and it is computed and written down once. What
    was no success is not kept, so that a repeat is a new request; neither is a stream that ended by an error.

    max_body_bytes: of the request
    """

    def __init__(self, app: ASGIApp, replays: Replays, *, max_body_bytes: int) -> None:
        self._app = app
        self._replays = replays
        self._max_body_bytes = max_body_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        key = headers.get(NAME)
        if key is None or not self._replays.settings.seconds:
            await self._app(scope, receive, send)
            return
        identity: Identity = scope["state"]["identity"]
        tenant = identity.tenant.name
        length = headers.get("content-length")
        body = await read_body(receive, content_length=length, max_bytes=self._max_body_bytes)
        fingerprint = fingerprint_of(scope["path"], headers.get(HEADER, ""), body)
        recording = self._replays.find(tenant, key, fingerprint)
        if recording is not None:
            await _follow(recording, receive, send, is_first=False)
            return
        recording = self._replays.begin(tenant, key, fingerprint)
        answer = self._answer(scope, body, recording, tenant=tenant, key=key)
        task = asyncio.get_running_loop().create_task(answer, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await _follow(recording, receive, send, is_first=True)
        await asyncio.shield(task)

    async def _answer(self, scope: Scope, body: bytes, recording: Recording, *, tenant: str, key: str) -> None:
        """Have the request computed, whoever is still there."""
        sent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            recording.add(message)

        is_kept = False
        try:
            await self._app(scope, receive, send)  # the first client's scope, so that it is counted once
            served: Served | None = scope["state"].get("served")
            is_kept = served is not None and served.status == 200 and served.is_whole
        finally:
            self._replays.end(tenant, key, recording, is_kept=is_kept)


async def _follow(recording: Recording, receive: Receive, send: Send, *, is_first: bool) -> None:
    """Send what is there and what comes, until the client leaves."""
    following = asyncio.ensure_future(_send_all(recording, send, is_first=is_first))
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({following, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
        else:
            raise ClientGone
    finally:
        following.cancel()
        leaving.cancel()


async def _send_all(recording: Recording, send: Send, *, is_first: bool) -> None:
    async for message in recording.messages():
        copy = dict(message)
        if copy["type"] == "http.response.start" and not is_first:
            copy["headers"] = [*message.get("headers", ()), (FIRST, b"true")]  # type: ignore[misc]
        await send(copy)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
