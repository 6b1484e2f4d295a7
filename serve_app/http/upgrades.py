"""Tells clients that offer to upgrade the connection why their body did not arrive."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.error_text import shown
from serve_app.core.errors import BodyLost


class Upgrades:
    """ASGI middleware that refuses a body which the server before us dropped.

    uvicorn's parser in C (httptools) ends a request after its headers where `Connection: Upgrade` is among them, as
    curl --http2 and Java's HttpClient send it: the application gets an empty body, and what follows on the connection
    is no request. Behind any other parser, and behind our own protocol (see `declined_upgrades`), the body is there and
    nothing is refused.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        upgrade = _upgrade_before_a_body(Headers(scope=scope)) if scope["type"] == "http" else None
        await self._app(scope, receive if upgrade is None else _checked(receive, upgrade), send)


def _upgrade_before_a_body(headers: Headers) -> str | None:
    """What the client would upgrade to, where it sends a body."""
    announces_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return headers.get("upgrade") if announces_body else None


def _checked(receive: Receive, upgrade: str) -> Receive:
    """`receive`, which raises BodyLost where nothing of the body comes."""
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
