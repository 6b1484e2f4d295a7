"""One exchange with a client: its body, the headers beside its answer, and errors in its dialect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import NoReturn

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.dialects import HEADER, UNION, Dialect, dialect_named, error_body, error_event_body, error_status
from serve_app.api.error_text import shown
from serve_app.api.paths import Path
from serve_app.api.sse import DONE, dump, event
from serve_app.core.errors import (
    BodyLost,
    EngineFailed,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestTimeout,
    ServeError,
    Unauthenticated,
    UnsupportedMediaType,
)
from serve_app.core.log_context import about
from serve_app.core.tenants import Meter
from serve_app.router.quotas import Rates

logger = logging.getLogger(__name__)

RawHeaders = list[tuple[bytes, bytes]]

BODY_TIMEOUT_S = 60.0
"""How long a client may take to send a body."""


class ClientGone(Exception):
    """Raised when the client has closed its connection, so that nobody is left to be told anything."""


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
        """Send a whole JSON response."""
        body = dump(content).encode()
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", b"application/json"), length, *headers])
        await self._end(body)

    async def stream(self, piece: bytes) -> None:
        """Send the next bytes of a stream of events; the first bring the status line with them."""
        if not self.has_started:
            await self._begin_stream()
        await self._write({"type": "http.response.body", "body": piece, "more_body": True})

    async def end_stream(self, piece: bytes) -> None:
        """Send the last bytes of a stream."""
        if not self.has_started:
            await self._begin_stream()
        await self._end(piece)

    async def fail(self, error: ServeError) -> None:
        """Tell the client of the error: by the status line if nothing was sent yet, otherwise by a last event."""
        if self.is_over:
            return
        if self.has_started:
            await self._end(self.last_event(error))
        else:
            status = error_status(error, self.dialect)
            await self.respond(status, error_body(error, self.dialect), headers=headers_of(error))

    def _error_event(self, error: ServeError) -> bytes:
        return event(dump(error_event_body(error, self.dialect))) + DONE

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
    """Return the headers that an error brings with it."""
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
    """Return the whole body. Refuse a large one by its announced length, or as soon as more has arrived.

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
            raise too_large(max_bytes)
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        num_bytes += len(pieces[-1])
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def watched(work: Awaitable[object], receive: Receive, exchange: Exchange) -> None:
    """Do the work of a response, but end it if its client leaves before the response is over.

    Raises what the work raises, and ClientGone, in a group.
    """

    async def watch() -> None:
        await left(receive)
        if not exchange.is_over:
            raise ClientGone

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch())
        await work
        watcher.cancel()


def having(body: bytes) -> Receive:
    """Return what gives a body that is there already, to an application whose client does not leave."""
    arrived: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return arrived.pop() if arrived else await asyncio.Future[Message]()

    return receive


async def left(receive: Receive) -> None:
    """Wait for the client to leave.

    A server may also fail to say more of a client that has left, as Ray does where it cancels the call: that is the
    same.
    """
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


def too_large(max_bytes: int) -> PayloadTooLarge:
    """Return the refusal of a body that is larger."""
    return PayloadTooLarge(f"The request body must be at most {max_bytes} bytes.", None, {"max_body_bytes": max_bytes})


JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)


def check_media_type(headers: Headers) -> None:
    """Check that the body is JSON, as a body without a type is taken to be. Raises UnsupportedMediaType."""
    media_type = headers.get("content-type", "").partition(";")[0].strip()
    if media_type and not JSON_TYPE.fullmatch(media_type):
        raise UnsupportedMediaType.refusing("Content-Type", must="be application/json", found=shown(media_type))


async def body_of(request: Request, *, max_bytes: int) -> bytes:
    """Return the request's JSON body. Raises ServeError and ClientGone."""
    check_media_type(request.headers)
    return await read_body(request.receive, content_length=request.headers.get("content-length"), max_bytes=max_bytes)


NAMES = {
    meter: tuple(f"x-ratelimit-{told}-{what}".encode() for told in ("limit", "remaining", "reset"))
    for meter, what in ((Meter.REQUESTS, "requests"), (Meter.TOKENS, "tokens"))
}
TOLD_OF_RATES = frozenset(name for names in NAMES.values() for name in names)


def rate_headers(rates: Rates) -> list[tuple[bytes, bytes]]:
    """Return three headers per limit: its size, what is left, and the time until all of it is there again."""
    headers = []
    for meter, rate in rates.items():
        limit, remaining, reset = NAMES[meter]
        headers += [
            (limit, b"%d" % rate.limit),
            (remaining, b"%d" % rate.remaining),
            (reset, duration(rate.reset_s).encode()),
        ]
    return headers


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: `120ms`, `1s`, `6m0s`, `1h0m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60}m{rest}s"


def dialect_asked(headers: Headers) -> Dialect | None:
    """Return the dialect that the headers name, or None. Raises InvalidRequest for an unknown one."""
    name = headers.get(HEADER)
    return None if name is None else dialect_named(name)


def dialect_heard(scope: Scope, default: Dialect) -> Dialect:
    """Return the dialect that the request's header names; the default if it names none that is known."""
    try:
        return dialect_asked(Headers(scope=scope)) or default
    except InvalidRequest:
        return default


def route(path: Path, endpoint: Callable[[Request], Awaitable[Response]] | ASGIApp) -> Route:
    """Return the route of a path and what answers it. What is in braces may hold slashes."""
    return Route(path.replace("}", ":path}"), endpoint, methods=[path.method])


async def raise_as_ours(request: Request, error: Exception) -> NoReturn:
    """Raise Starlette's refusals of routes and methods as errors of ours."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        raise NotFound(f"There is no route {shown(path)}.") from None
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        raise MethodNotAllowed(
            f"{path} must be called with {allowed}; found {request.method}.", None, {"allow": allowed}
        ) from None
    raise error


def as_serve_error(error: Exception, request_id: str) -> ServeError:
    """Return the error, or EngineFailed for one that nobody foresaw; its details go to the log alone."""
    if isinstance(error, ServeError):
        return error
    logger.error("request %s failed", request_id, exc_info=error, extra=about([request_id]))
    return EngineFailed("The server failed to answer the request.")
