"""Makes a route of a path, and finds the path that a request was meant for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serve_app.api.paths import Path

MODEL_PREFIX = str(Path.MODEL).removesuffix("{id}")
OTHER_PATHS = frozenset(Path) - {Path.MODEL}


def route(path: Path, endpoint: Callable[[Request], Awaitable[Response]] | ASGIApp) -> Route:
    """`endpoint` answers `path`. What is in braces may hold slashes."""
    return Route(path.replace("}", ":path}"), endpoint, methods=[path.method])


def path_of(path: str) -> Path | None:
    """The path of ours that this one is; None where it is none of them."""
    if path.startswith(MODEL_PREFIX):
        return Path.MODEL
    return Path(path) if path in OTHER_PATHS else None
