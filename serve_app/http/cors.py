"""Lets web pages of configured origins call the service from a browser."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.dialects import HEADER
from serve_app.api.responses import IGNORED, SEED, SUFFIX_MODE, TOOL_PROMPT, TRUNCATED, UNENFORCED
from serve_app.http.exchange import NAMES
from serve_app.http.idempotency import REPLAYED

TOLD = (HEADER, IGNORED, SEED, SUFFIX_MODE, TOOL_PROMPT, TRUNCATED, UNENFORCED, "x-request-id", "retry-after", REPLAYED)
READABLE = (*TOLD, *(name.decode() for names in NAMES.values() for name in names))
PREFLIGHT_S = 600
"""How long a browser may remember the answer to a preflight."""
ALLOWED: dict[str, Any] = {
    "allow_methods": ["GET", "POST"],
    "allow_headers": ["*"],
    "expose_headers": list(READABLE),
    "max_age": PREFLIGHT_S,
}


def cors(origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware that answers preflights and marks responses; none where no origin is configured.

    A key is sent as a header by the page's own script, so no cookies are allowed.
    """
    if not origins:
        return []
    return [Middleware(CORSMiddleware, allow_origins=list(origins), **ALLOWED)]


def cors_of_tenants(origins: Sequence[str], of_tenants: Callable[[], frozenset[str]]) -> list[Middleware]:
    """Return the middleware for tenants that have origins of their own.

    A preflight comes without a key: it is answered for an origin of any tenant, and so is what is refused before it is
    known whose it is: a page can tell that its key has expired. What a tenant is answered may be read by its own pages
    and the service's alone.
    """
    return [Middleware(TenantCors, origins=frozenset(origins), of_tenants=of_tenants)]


class TenantCors:
    """ASGI middleware that allows the origins of the tenant, whose identity the guard noted."""

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
