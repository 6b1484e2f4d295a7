"""Answers a request that comes again under its `Idempotency-Key` with the bytes of the first answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from serve_app.api.dialects import HEADER
from serve_app.core.errors import DeadlineExceeded, ServeError, Unavailable
from serve_app.core.ledger import CLIENT_LEFT
from serve_app.core.tenants import Identity
from serve_app.http.exchange import TOLD_OF_RATES, as_serve_error, having, left, rate_headers, read_body
from serve_app.http.metrics import Served
from serve_app.http.streams import in_time
from serve_app.router.accounts import AccountsClient
from serve_app.router.idempotency import Claim, Message, Recording, Replays, Standing, fingerprint_of
from serve_app.router.patience import begin
from serve_app.router.quotas import Rates

NAME = b"idempotency-key"
REPLAYED = "idempotency-replayed"
POLL_S = 0.25
DELIVERY_S = 1.0
MAX_DELIVERIES = 60


class Idempotent:
    """Wraps a route that computes. A request without the header passes as it is.

    With it, the request is computed apart from whoever asked: a client that leaves and comes again, or comes twice,
    follows the one answer from its first byte, be it whole or a stream, and it is computed and written down once. What
    was no success is not kept, so that a repeat is a new request; neither is a stream that ended by an error.

    book: of all routers, where there are several: an answer of another one is given again, and waited for where it is
          still being computed; None asks nobody
    max_body_bytes: of the request
    max_stall_s: a client that reads nothing for so long is given up
    rates: how the limits of whoever asks stand
    """

    def __init__(
        self,
        app: ASGIApp,
        replays: Replays,
        *,
        max_body_bytes: int,
        max_stall_s: float = 60.0,
        book: AccountsClient | None = None,
        rates: Callable[[], Rates] = dict,
    ) -> None:
        self._app = app
        self._rates = rates
        self._replays = replays
        self._book = book
        self._max_body_bytes = max_body_bytes
        self._max_stall_s = max_stall_s
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request without the header on directly, so that its messages cost nothing here."""
        seconds = self._replays.settings.seconds
        if not seconds or NAME not in [name for name, _ in scope["headers"]]:
            return self._app(scope, receive, send)
        return self._follow(scope, receive, send, seconds=seconds)

    async def _follow(self, scope: Scope, receive: Receive, send: Send, *, seconds: float) -> None:
        headers = Headers(scope=scope)
        key = headers[NAME.decode()]
        identity: Identity = scope["state"]["identity"]
        length = headers.get("content-length")
        body = await read_body(receive, content_length=length, max_bytes=self._max_body_bytes)
        fingerprint = fingerprint_of(scope["path"], headers.get(HEADER, ""), body)
        claim = Claim(
            tenant=identity.tenant.own, key=key, fingerprint=fingerprint, attempt=uuid4().hex, seconds=seconds
        )
        while (recording := self._replays.find(claim)) is not None:
            with contextlib.suppress(DeadlineExceeded):
                if await self._has_left(recording, receive, send, is_first=False):
                    scope["state"]["served"] = Served(status=CLIENT_LEFT, run=None)
                return
        recording = self._replays.begin(claim)
        task = begin(self._answer(scope, body, recording, claim), self._tasks)
        await self._has_left(recording, receive, send, is_first=True)
        await asyncio.shield(task)  # whoever has left meanwhile: it counts as what it comes to

    async def _answer(self, scope: Scope, body: bytes, recording: Recording, claim: Claim) -> None:
        """Answer the request with another router's answer or by computing it, whether or not its client is there."""
        is_kept, found = False, None
        failure: ServeError | None = None
        try:
            found = await self._claimed(claim)
            if found is None:
                is_kept = await self._compute(scope, body, recording)
            else:
                is_kept = recording.is_repeat = True
                for message in found:
                    recording.add(message)
        except Exception as error:
            failure = as_serve_error(error, scope["state"]["request_id"])  # raised for all who follow
        finally:
            if self._book is not None and found is None:  # also where it is not known whether it was claimed
                begin(_deliver(self._book, claim, recording.so_far if is_kept else None), self._tasks)
            elif self._book is not None:
                self._book.leave(claim)
            self._replays.end(claim, is_kept=is_kept, error=failure)

    async def _claimed(self, claim: Claim) -> tuple[Message, ...] | None:
        """Return another router's answer once it is there; None if this router is to compute it. Raises ServeError."""
        while self._book is not None:
            found = await self._book.claim(claim)
            if found is Standing.YOURS:
                return None
            if isinstance(found, tuple):
                return found
            await asyncio.sleep(POLL_S)
        return None

    async def _compute(self, scope: Scope, body: bytes, recording: Recording) -> bool:
        """Compute the answer in the first client's scope, which counts it once. Return whether to keep it."""

        async def send(message: AsgiMessage) -> None:
            recording.add(message)

        await self._app(scope, having(body), send)
        served: Served | None = scope["state"].get("served")
        return served is not None and served.status == 200 and served.is_whole

    async def _has_left(self, recording: Recording, receive: Receive, send: Send, *, is_first: bool) -> bool:
        """Send what is there and what comes. Return whether the client left, or stopped reading, before the end."""
        following = asyncio.ensure_future(self._is_unread(recording, send, is_first=is_first))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({following, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return following.result() if following.done() else True
        finally:
            following.cancel()
            leaving.cancel()

    async def _is_unread(self, recording: Recording, send: Send, *, is_first: bool) -> bool:
        """Raises DeadlineExceeded where whoever asked first had too little time; who follows may have more."""
        async for message in recording.messages():
            copy = dict(message)
            if not is_first and copy.get("status") == DeadlineExceeded.status:
                await recording.over()
                raise DeadlineExceeded("Whoever asked first had less time.")
            if copy["type"] == "http.response.start" and (recording.is_repeat or not is_first):
                copy["headers"] = self._headers_of_repeat(message.get("headers", ()))  # type: ignore[arg-type]
            try:
                await in_time(send(copy), self._max_stall_s)
            except (DeadlineExceeded, OSError):  # ASGI 2.4: a server may say so when the client has gone
                return True
        return False

    def _headers_of_repeat(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the answer's headers with the limits as they stand now; a repeat takes nothing from them."""
        kept = [(name, value) for name, value in headers if name not in TOLD_OF_RATES]
        return [*kept, *rate_headers(self._rates()), (REPLAYED.encode(), b"true")]


async def _deliver(book: AccountsClient, claim: Claim, answer: tuple[Message, ...] | None) -> None:
    """Tell the other routers, and try again while they cannot be reached."""
    try:
        for _ in range(MAX_DELIVERIES):
            try:
                await book.deliver(claim, answer)
            except Unavailable:
                await asyncio.sleep(DELIVERY_S)
            else:
                return
    finally:
        book.leave(claim)
