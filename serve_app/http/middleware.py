"""ASGI middleware that every request passes."""

from __future__ import annotations

import asyncio
import re
import secrets
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.dialects import Dialect
from serve_app.api.error_text import shown
from serve_app.api.openapi import TOLD_HEADERS
from serve_app.core.errors import BodyLost, InvalidRequest, UnsupportedMediaType
from serve_app.core.log_context import log_context
from serve_app.http.exchange import NAMES, Exchange, as_serve_error, dialect_heard
from serve_app.http.idempotency import REPLAYED

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class FailuresAsJson:
    """ASGI middleware that gives every request an id, and turns every failure into a JSON error in its dialect.

    The id is the client's own `x-request-id` where that is well formed.
    dialect: of requests that name none
    """

    def __init__(self, app: ASGIApp, *, sends_request_id: bool, dialect: Dialect) -> None:
        self._app = app
        self._sends_request_id = sends_request_id
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if REQUEST_ID.fullmatch(sent) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if self._sends_request_id:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            with log_context([request_id]):
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            if has_started:
                raise
            exchange = Exchange(send_with_id, dialect_heard(scope, self._dialect))
            exchange.tell = lambda: scope["state"].get("beside", [])
            await exchange.fail(as_serve_error(error, request_id))


class TrailingSlash:
    """ASGI middleware that takes slashes from the end of a path. A redirect would lose the body of many clients.

    What Serve mounts the application at (`route_prefix`) goes as well, so that everything behind reads one path.

    state: `had_slash` on the request, for a page whose links are relative to where it stands; `had_nothing`, where the
    application is mounted, if nothing came behind that
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("root_path"):
            mounted_at = scope["root_path"].rstrip("/")
            if scope["path"] == mounted_at:
                scope["path"], scope["root_path"] = "/", ""
                scope.setdefault("state", {})["had_nothing"] = mounted_at
            elif scope["path"].startswith(mounted_at + "/"):
                scope["path"], scope["root_path"] = scope["path"].removeprefix(mounted_at), ""
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
            scope.setdefault("state", {})["had_slash"] = True
            scope["raw_path"] = (scope.get("raw_path") or b"").rstrip(b"/") or b"/"
        await self._app(scope, receive, send)


Channels = tuple[Receive, Send]


class Filters:
    """ASGI middleware that hands each request through every filter, which may refuse it or change what it receives."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for filtered in FILTERS:
                receive, send = filtered(scope, receive, send)
        await self._app(scope, receive, send)


REFUSED = {
    "x-request-timeout-seconds": "would replace the server's own time limit",
    "x-request-disconnect-disabled": "would keep the server computing after the client has left",
    "serve-multiplexed-model-id": "would change how Serve routes the request",
}


def without_steering(scope: Scope, receive: Receive, send: Send) -> Channels:
    """Raise InvalidRequest where a header of `REFUSED` is present."""
    for raw_name, _ in scope["headers"]:
        name = raw_name.decode("latin-1").lower().replace("_", "-")  # Serve takes either spelling of the last one
        if name in REFUSED:
            raise InvalidRequest.refusing(name, must=f"not be sent, as it {REFUSED[name]}", found="that header")
    return receive, send


def whole_for_http10(scope: Scope, receive: Receive, send: Send) -> Channels:
    """Give a client of HTTP/1.0 a stream in one piece, with its length.

    The server before us would send chunks, which such a client takes for the body. The server cannot be told to end the
    body by closing the connection. A client that wants to see a stream grow has to ask in HTTP/1.1.
    """
    start: Message | None = None
    pieces: list[bytes] = []

    async def send_whole(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start" and not _has_length(message):
            start = message
        elif start is None:
            await send(message)
        else:
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = b"".join(pieces)
                length = (b"content-length", str(len(body)).encode())
                await send({**start, "headers": [*start.get("headers", ()), length]})
                await send({"type": "http.response.body", "body": body, "more_body": False})

    return receive, send_whole if scope.get("http_version") == "1.0" else send


def _has_length(message: Message) -> bool:
    return any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))


def upgrades(scope: Scope, receive: Receive, send: Send) -> Channels:
    """Refuse a body which the server before us dropped.

    uvicorn's parser in C (httptools) ends a request after its headers where `Connection: Upgrade` is among them, as
    curl --http2 and Java's HttpClient send it. The application then gets an empty body, and what follows on the
    connection is no request. Behind any other parser the body is there, and nothing is refused.
    """
    upgrade = _upgrade_before_a_body(Headers(scope=scope))
    return receive if upgrade is None else _checked(receive, upgrade), send


def _upgrade_before_a_body(headers: Headers) -> str | None:
    """Return the protocol that a request with a body offers to upgrade to; None where it offers none."""
    announces_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return headers.get("upgrade") if announces_body else None


def _checked(receive: Receive, upgrade: str) -> Receive:
    """Return a `receive` that raises BodyLost if nothing of the body comes."""
    is_first = True

    async def checked() -> Message:
        nonlocal is_first
        message = await receive()
        if is_first and message["type"] == "http.request" and not (message.get("body") or message.get("more_body")):
            raise BodyLost(
                f"The request body was lost, as the request offers to upgrade the connection to {shown(upgrade)}. Send"
                " it without the header Upgrade, as HTTP/1.1 (curl --http1.1; in Java HttpClient.Version.HTTP_1_1).",
                "Upgrade",
            )
        is_first = False
        return message

    return checked


NAME = "Content-Encoding"
GZIP = ("gzip", "x-gzip")
HONEST = "be the encoding of the request body"
PIECE_BYTES = 64 * 1024
GZIP_WINDOW = 16 + zlib.MAX_WBITS


def unpacked(scope: Scope, receive: Receive, send: Send) -> Channels:
    """Give a gzip body as a plain one, in pieces of bounded size.

    Whoever reads the body bounds it by what arrives there, so a small body that unpacks to a large one is refused as
    any large one is. Any other encoding is refused when the body is read, by UnsupportedMediaType; a damaged body by
    InvalidRequest.
    """
    encoding = Headers(scope=scope).get(NAME, "").strip().lower()
    if encoding in ("", "identity"):
        return receive, send
    plain = _plain(receive) if encoding in GZIP else _refused(encoding)

    async def receive_plain() -> Message:
        message = await anext(plain, None)
        return await receive() if message is None else message

    return receive_plain, send


async def _plain(receive: Receive) -> AsyncIterator[Message]:
    """Yield the messages of a body, unpacked as they are read. Raises InvalidRequest."""
    stream, has_more = zlib.decompressobj(GZIP_WINDOW), True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            yield message
            return
        packed, has_more = message.get("body", b""), message.get("more_body", False)
        while packed:
            if stream.eof:  # several streams may follow each other
                stream = zlib.decompressobj(GZIP_WINDOW)
            try:
                piece = stream.decompress(packed, PIECE_BYTES)
            except zlib.error:
                raise InvalidRequest.refusing(NAME, must=HONEST, found="bytes that are no gzip") from None
            packed = stream.unused_data or stream.unconsumed_tail
            if piece:
                yield {"type": "http.request", "body": piece, "more_body": True}
                await asyncio.sleep(0)  # pieces of a body that is here already must not hold up everybody else
    if not stream.eof:
        raise InvalidRequest.refusing(NAME, must=HONEST, found="gzip that ends too early")
    yield {"type": "http.request", "body": b"", "more_body": False}


async def _refused(encoding: str) -> AsyncIterator[Message]:
    raise UnsupportedMediaType.refusing(NAME, must="be gzip or identity", found=shown(encoding))
    yield  # it is read as a body


FILTERS: tuple[Callable[[Scope, Receive, Send], Channels], ...] = (
    without_steering,
    whole_for_http10,
    unpacked,
    upgrades,
)


READABLE = (
    *TOLD_HEADERS,
    "x-request-id",
    "retry-after",
    REPLAYED,
    *(name.decode() for names in NAMES.values() for name in names),
)
PREFLIGHT_S = 600
"""How long a browser may remember the answer to a preflight."""
ALLOWED: dict[str, Any] = {
    "allow_methods": ["GET", "POST"],
    "allow_headers": ["*"],
    "expose_headers": list(READABLE),
    "max_age": PREFLIGHT_S,
}


class Cors:
    """ASGI middleware that answers preflights and marks responses, for the service's origins and those of tenants.

    A key is sent as a header by the page's own script, so no cookies are allowed. A preflight comes without a key: it
    is answered for an origin of any tenant, and so is what is refused before it is known whose it is: a page can tell
    that its key has expired. What a tenant is answered may be read by its own pages and the service's alone; whose it
    is the guard noted.
    """

    def __init__(self, app: ASGIApp, *, origins: frozenset[str], of_tenants: Callable[[], frozenset[str]]) -> None:
        self._app = app
        self._origins = origins
        self._of_tenants = of_tenants

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request without an origin on directly, so that its messages cost nothing here."""
        if scope["type"] != "http" or b"origin" not in [name for name, _ in scope["headers"]]:
            return self._app(scope, receive, send)
        return self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers["origin"]

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers(origin, scope)]
            await send(message)

        known = self._origins | self._of_tenants()
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers and known:
            preflights = CORSMiddleware(self._app, allow_origins=sorted(known), **ALLOWED)
            await preflights(scope, receive, send)
        else:
            await self._app(scope, receive, watched)

    def _headers(self, origin: str, scope: Scope) -> list[tuple[bytes, bytes]]:
        identity = scope.get("state", {}).get("identity")
        of_tenants = self._of_tenants() if identity is None else identity.tenant.cors_origins
        allowed = self._origins.union(of_tenants)
        if not ({origin, "*"} & allowed):
            return [(b"vary", b"Origin")]
        told = ", ".join(READABLE).encode()
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", told),
            (b"vary", b"Origin"),
        ]
