"""One HTTP exchange in raw ASGI: the body of the request in, one response or one stream of events out."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from serve_app.api.dialects import HEADER, UNION, Dialect, error_body, error_event_body, error_status
from serve_app.api.error_text import shown
from serve_app.api.sse import DONE, dump, error_event
from serve_app.core.errors import (
    BodyLost,
    InvalidRequest,
    MethodNotAllowed,
    PayloadTooLarge,
    RequestTimeout,
    ServeError,
    Unauthenticated,
    UnsupportedMediaType,
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

BODY_TIMEOUT_S = 60.0
"""How long a client may take to send a body."""


class ClientGone(Exception):
    """The client closed its connection; nobody is left to be told anything."""


class Exchange:
    """The response of one request. Once a stream has begun, the only way to fail is an event in it.

    dialect: in which errors are told; named in every response
    status:  what was answered; 200 until something is
    tell:    asked for further headers when the response begins
    last_event: of a stream that fails
    """

    def __init__(self, send: Send, dialect: Dialect = UNION) -> None:
        self.dialect = dialect
        self.status = 200
        self.tell: Callable[[], RawHeaders] = list
        self.last_event: Callable[[ServeError], bytes] = self._error_event
        self.has_started = False
        self.is_over = False
        self._send = send

    async def respond(self, status: int, content: object, *, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """A whole JSON response."""
        body = dump(content).encode()
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", b"application/json"), length, *headers])
        await self._end(body)

    async def stream(self, piece: bytes) -> None:
        """The next bytes of a stream of events; the first bring the status line with them."""
        if not self.has_started:
            await self._begin_stream()
        await self._write({"type": "http.response.body", "body": piece, "more_body": True})

    async def end_stream(self, piece: bytes) -> None:
        """The last bytes of a stream."""
        if not self.has_started:
            await self._begin_stream()
        await self._end(piece)

    async def fail(self, error: ServeError) -> None:
        """Tell the client: by the status line where nothing was sent yet, otherwise by a last event."""
        if self.is_over:
            return
        if self.has_started:
            await self._end(self.last_event(error))
        else:
            status = error_status(error, self.dialect)
            await self.respond(status, error_body(error, self.dialect), headers=headers_of(error))

    def _error_event(self, error: ServeError) -> bytes:
        return error_event(error_event_body(error, self.dialect)) + DONE

    async def _begin_stream(self) -> None:
        await self._start(
            200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        )

    async def _start(self, status: int, headers: RawHeaders) -> None:
        self.has_started = True
        self.status = status
        named = (HEADER.lower().encode(), self.dialect.name.encode())
        await self._write({"type": "http.response.start", "status": status, "headers": [*headers, named, *self.tell()]})

    async def _end(self, body: bytes) -> None:
        self.is_over = True
        await self._write({"type": "http.response.body", "body": body, "more_body": False})

    async def _write(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:  # ASGI 2.4: a server may say so when the client has gone
            raise ClientGone from error


def headers_of(error: ServeError) -> RawHeaders:
    """Headers that an error brings with it."""
    headers: RawHeaders = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", str(error.facts.get("allow", "")).encode()))
    if isinstance(error, UnsupportedMediaType) and error.param == "Content-Encoding":
        headers.append((b"accept-encoding", b"gzip"))
    if isinstance(error, PayloadTooLarge | BodyLost):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    return headers


async def read_body(
    receive: Receive, *, content_length: str | None, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S
) -> bytes:
    """The whole body. Refuses a large one by its announced length, or as soon as more has arrived.

    Raises PayloadTooLarge, InvalidRequest, RequestTimeout, ClientGone.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_pieces(receive, content_length=content_length, max_bytes=max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"The request body did not arrive within {timeout_s:g} s.") from None


async def _read_pieces(receive: Receive, *, content_length: str | None, max_bytes: int) -> bytes:
    if content_length is not None:
        if not (content_length.isascii() and content_length.isdigit()):
            raise InvalidRequest.refusing("Content-Length", must="be a number", found=shown(content_length))
        if len(content_length) > 15 or int(content_length) > max_bytes:
            raise _too_large(max_bytes)
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        num_bytes += len(pieces[-1])
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def watch(receive: Receive, exchange: Exchange) -> None:
    """Wait for the client to leave. Raises ClientGone where the response was not over by then.

    A server may also fail to say more of a client that has left, as Ray does where it cancels the call: that is the
    same.
    """
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass
    if not exchange.is_over:
        raise ClientGone


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body must be at most {max_bytes} bytes.", None, {"max_body_bytes": max_bytes})
