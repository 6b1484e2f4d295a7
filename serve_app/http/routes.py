"""Makes a route of a path, and finds the path that a request was meant for."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serve_app.api.paths import AdminPath, Path

MODEL_PREFIX = str(Path.MODEL).removesuffix("{id}")
KNOWN: dict[str, Path] = {path.value: path for path in Path if "{" not in path}
CONSOLE_FILE = re.compile(re.escape(Path.CONSOLE_FILE.removesuffix("{file}")) + r"[a-z][a-z-]*\.(?:css|js|svg)")
ADMIN_PREFIX = "/admin/"
ADMIN_PATTERNS = {path: re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in AdminPath}


def route(path: Path, endpoint: Callable[[Request], Awaitable[Response]] | ASGIApp) -> Route:
    """Return the route of a path and what answers it. What is in braces may hold slashes."""
    return Route(path.replace("}", ":path}"), endpoint, methods=[path.method])


def path_of(path: str) -> Path | AdminPath | None:
    """Return the path of the service that this is; None if there is none."""
    found = KNOWN.get(path)
    if found is not None:
        return found
    if path.startswith(MODEL_PREFIX):
        return Path.MODEL
    if CONSOLE_FILE.fullmatch(path):
        return Path.CONSOLE_FILE
    return _admin_path(path) if path.startswith(ADMIN_PREFIX) or path == AdminPath.OWN_USAGE else None


def _admin_path(path: str) -> AdminPath | None:
    return next((each for each, pattern in ADMIN_PATTERNS.items() if pattern.fullmatch(path)), None)
