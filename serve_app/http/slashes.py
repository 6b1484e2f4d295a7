"""Lets a route be called with a slash behind it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlash:
    """ASGI middleware that takes slashes from the end of a path. A redirect would lose the body of many clients.

    state: `had_slash` on the request, for a page whose links are relative to where it stands
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
            scope.setdefault("state", {})["had_slash"] = True
            scope["raw_path"] = (scope.get("raw_path") or b"").rstrip(b"/") or b"/"
        await self._app(scope, receive, send)
