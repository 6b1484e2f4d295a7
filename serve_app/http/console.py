"""GET /console: a page for people, and the files that it is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from serve_app.api.paths import Path
from serve_app.core.errors import NotFound
from serve_app.http.routes import route

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
        """The file, or that a browser has it."""
        headers = {**HEADERS, "etag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.kind, headers=headers)


def console_routes() -> list[Route]:
    """They hold nothing of the service, and are the same for whoever asks."""

    async def page(request: Request) -> Response:
        if request.scope["state"].get("had_slash"):  # what the page links to is relative
            return RedirectResponse("../console", 308, headers={"content-type": "text/plain"})
        return static_files()[PAGE].answer(request)

    async def file(request: Request) -> Response:
        name = request.path_params["file"]
        found = static_files().get(name) if name != PAGE else None
        if found is None:
            raise NotFound("There is no such file of the console.")
        return found.answer(request)

    return [route(Path.CONSOLE, page), route(Path.CONSOLE_FILE, file)]


@cache
def static_files() -> Mapping[str, StaticFile]:
    """By name, read once."""
    folder = files("serve_app.http").joinpath("pages/console")
    kinds = {each.name: KINDS.get(each.name.rpartition(".")[2]) for each in folder.iterdir()}
    return MappingProxyType(
        {name: _read(folder.joinpath(name).read_bytes(), kind) for name, kind in kinds.items() if kind}
    )


def _read(content: bytes, kind: str) -> StaticFile:
    return StaticFile(content=content, kind=kind, tag=f'"{hashlib.sha256(content).hexdigest()[:16]}"')
