"""GET /openapi.json and GET /docs: the service's description, for programs and for people."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import lru_cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from serve_app.api.dialects import DIALECTS, Dialect
from serve_app.api.limits import WireLimits
from serve_app.api.openapi import openapi_document
from serve_app.api.paths import Path
from serve_app.http.routes import route

MAX_DOCUMENTS = 32
"""A third of a megabyte each, of tenants with bounds of their own."""
INLINE = {
    "script-src": re.compile(r"<script>(.*?)</script>", re.DOTALL),
    "style-src": re.compile(r"<style>(.*?)</style>", re.DOTALL),
}


def docs_routes(limits: WireLimits, dialect: Dialect, *, asks_for_keys: bool = False) -> list[Route]:
    """The document is made when it is first asked for. The page may load that and nothing else."""
    page = files("serve_app.http").joinpath("pages/docs.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": content_security_policy(page),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }

    async def openapi(request: Request) -> Response:
        return Response(described(limits, dialect.name, asks_for_keys=asks_for_keys), media_type="application/json")

    async def docs(request: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    return [route(Path.DESCRIPTION, openapi), route(Path.DOCS, docs)]


@lru_cache(maxsize=MAX_DOCUMENTS)
def described(limits: WireLimits, dialect: str, *, asks_for_keys: bool) -> bytes:
    """The document as it is sent: all who are bound alike share one, and nobody waits until it is written again."""
    document = openapi_document(limits, DIALECTS[dialect], asks_for_keys=asks_for_keys)
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def content_security_policy(page: str) -> str:
    """Allows the page's own script and style, by their digests, and requests to its own server."""
    rules = ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"]
    rules += [f"{name} {' '.join(map(_digest, pattern.findall(page)))}" for name, pattern in INLINE.items()]
    return "; ".join(rules)


def _digest(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
