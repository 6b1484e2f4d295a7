"""Routes of pages: the front door, the console and the documents of the API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from serve_app.api.paths import Path
from serve_app.http.console import HEADERS
from serve_app.http.routes import route

HTML = "text/html"
FRONT_HEADERS = {"cache-control": "no-cache", "vary": "accept", "x-content-type-options": "nosniff"}
ABOUT = "Text completions of many models. Where keys are asked for, send yours as `Authorization: Bearer …`."
PATHS = {
    "console": Path.CONSOLE,
    "docs": Path.DOCS,
    "openapi": Path.DESCRIPTION,
    "models": Path.MODELS,
    "completions": Path.COMPLETIONS,
    "chat": Path.CHAT,
    "responses": Path.RESPONSES,
    "health": Path.HEALTH,
}
"""Below the address that was asked."""


def front_route() -> Route:
    """It holds nothing of the service, and is the same for whoever asks."""
    body = {"service": "serve_app", "about": ABOUT, "paths": {name: path.value for name, path in PATHS.items()}}

    async def front(request: Request) -> Response:
        if HTML in request.headers.get("accept", "").lower():
            headers = {**HEADERS, **FRONT_HEADERS, "content-type": "text/plain"}
            return RedirectResponse(_console_beside(request), 302, headers=headers)
        return JSONResponse(body, headers=FRONT_HEADERS)

    return route(Path.FRONT, front)


def _console_beside(request: Request) -> str:
    """Relative, as nobody here knows what a proxy in front takes off the path."""
    folder = request.scope["state"].get("had_nothing", "").rpartition("/")[2]
    return f"{folder}{Path.CONSOLE}" if folder else Path.CONSOLE.removeprefix("/")
