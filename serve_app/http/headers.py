"""Refuses requests whose headers would make Serve treat them in a way that only an operator may choose.

Serve reads these headers before the application sees the request, in its Python proxy as behind HAProxy, so they
cannot be stripped here. Such a request is therefore refused before any work is done for it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.core.errors import InvalidRequest

REFUSED = {
    "x-request-timeout-seconds": "would replace the server's own time limit",
    "x-request-disconnect-disabled": "would keep the server computing after the client has left",
    "serve-multiplexed-model-id": "would change how Serve routes the request",
}


class HeaderGate:
    """ASGI middleware that raises InvalidRequest where such a header is present."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = _refusal(scope) if scope["type"] == "http" else None
        if error is not None:
            raise error
        await self._app(scope, receive, send)


def _refusal(scope: Scope) -> InvalidRequest | None:
    for raw_name, _ in scope["headers"]:
        name = raw_name.decode("latin-1").lower().replace("_", "-")  # Serve takes either spelling of the last one
        if name in REFUSED:
            return InvalidRequest.refusing(name, must=f"not be sent, as it {REFUSED[name]}", found="that header")
    return None
