"""Routes of pages: the front door, the console and the documents of the API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from serve_app.api.dialects import DIALECTS, Dialect
from serve_app.api.limits import WireLimits
from serve_app.api.openapi import openapi_document
from serve_app.api.paths import Path
from serve_app.core.errors import NotFound
from serve_app.http.exchange import route

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
"""Paths that the front page names."""


def front_route() -> Route:
    """Return the route of `/`, the same for every client: browsers go to the console, others get a list of paths."""
    body = {"service": "serve_app", "about": ABOUT, "paths": {name: path.value for name, path in PATHS.items()}}

    async def front(request: Request) -> Response:
        if HTML in request.headers.get("accept", "").lower():
            headers = {**HEADERS, **FRONT_HEADERS, "content-type": "text/plain"}
            return RedirectResponse(_console_beside(request), 302, headers=headers)
        return JSONResponse(body, headers=FRONT_HEADERS)

    return route(Path.FRONT, front)


def _console_beside(request: Request) -> str:
    """Return the console's address relative to this one: a proxy in front may take a part off the path."""
    folder = request.scope["state"].get("had_nothing", "").rpartition("/")[2]
    return f"{folder}{Path.CONSOLE}" if folder else Path.CONSOLE.removeprefix("/")


PAGE = "index.html"
KINDS = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
"""Nothing but the service's own files and answers; and no text can become markup, whatever a script does with it."""
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticFile:
    """kind: its media type;  tag: changes when the content does"""

    content: bytes
    kind: str
    tag: str

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has it."""
        headers = {**HEADERS, "etag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.kind, headers=headers)


def console_routes() -> list[Route]:
    """Return the routes of the console's files, the same for every client. At `/docs` it begins with the API."""

    async def page(request: Request) -> Response:
        if request.scope["state"].get("had_slash"):  # what the page links to is relative
            return RedirectResponse(f"..{request.scope['path']}", 308, headers={"content-type": "text/plain"})
        return static_files()[PAGE].answer(request)

    async def file(request: Request) -> Response:
        name = request.path_params["file"]
        found = static_files().get(name) if name != PAGE else None
        if found is None:
            raise NotFound("There is no such file of the console.")
        return found.answer(request)

    return [route(Path.CONSOLE, page), route(Path.DOCS, page), route(Path.CONSOLE_FILE, file)]


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Return the console's files by name, read once."""
    folder = files("serve_app.http").joinpath("pages/console")
    found = {}
    for each in folder.iterdir():
        if kind := KINDS.get(each.name.rpartition(".")[2]):
            content = each.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[each.name] = StaticFile(content=content, kind=kind, tag=tag)
    return MappingProxyType(found)


MAX_DOCUMENTS = 32
"""Documents of tenants with bounds of their own that are kept, a third of a megabyte each."""


def description_route(limits: WireLimits, dialect: Dialect, *, asks_for_keys: bool = False) -> Route:
    """Return the route of `/openapi.json`. The document is made when it is first asked for."""

    async def openapi(request: Request) -> Response:
        return Response(described(limits, dialect.name, asks_for_keys=asks_for_keys), media_type="application/json")

    return route(Path.DESCRIPTION, openapi)


@lru_cache(maxsize=MAX_DOCUMENTS)
def described(limits: WireLimits, dialect: str, *, asks_for_keys: bool) -> bytes:
    """Return the document as it is sent; all tenants with the same bounds share one."""
    document = openapi_document(limits, DIALECTS[dialect], asks_for_keys=asks_for_keys)
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
