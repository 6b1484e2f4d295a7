"""The path of a request as the routes have it: without where the application is mounted, and without a slash behind."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


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
