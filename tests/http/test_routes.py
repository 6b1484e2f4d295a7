"""Paths are stated once: what is routed, counted and described is one list."""

from __future__ import annotations

import ast
from pathlib import Path as File

import pytest
from starlette.types import Message

from serve_app.api.paths import SERVICES, AdminPath, Path, path_of
from serve_app.core.errors import Unauthenticated
from serve_app.core.tenants import Identity
from serve_app.http.app import build_app, routes
from serve_app.http.guard import OPEN_DOOR, Door
from serve_app.http.metrics import Metrics
from serve_app.http.settings import HttpSettings
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router


def nobodys(key: str | None) -> Identity:
    raise Unauthenticated("No key was sent.")


PACKAGE = File(__file__).parents[2] / "serve_app"


def test_every_path_is_routed_with_its_method() -> None:
    router = Router(Fleet("r"))
    found = {
        route.path.replace(":path", ""): route.methods - {"HEAD"}
        for route in routes(router, HttpSettings(), Metrics(router.fleet))
    }
    of_services = {path.value: {method for each, method in SERVICES if each is path} for path in AdminPath}
    assert found == {path.value: {path.method} for path in Path} | of_services


@pytest.mark.parametrize(
    ("requested", "path"),
    [
        *((path.value, path) for path in Path if "{" not in path),
        ("/console/main.js", Path.CONSOLE_FILE),
        ("/console/base.css", Path.CONSOLE_FILE),
        ("/console/../metrics", None),
        ("/console/", None),
        ("/console/a/b.js", None),
        ("/console/index.html", None),
        ("/console/.js", None),
        ("/console/main.js/x", None),
        ("/v1/models/base:adapter", Path.MODEL),
        ("/v1/models/org/base", Path.MODEL),
        ("/v1/modelss", None),
        ("", None),
        ("/v1/completions/x", Path.COMPLETION),
        ("/v1/chat/completions/x", Path.CHAT_COMPLETION),
        ("/v1/chat/x", None),
    ],
)
def test_a_request_is_counted_under_the_path_that_answers_it(requested: str, path: Path | None) -> None:
    assert path_of(requested) is path


@pytest.mark.parametrize("door", [OPEN_DOOR, Door(identify=nobodys)])
@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/nowhere"])
async def test_a_websocket_is_closed_before_it_is_open(door: Door, path: str) -> None:
    app, sent = build_app(Router(Fleet("r")), door=door), []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message["type"])

    scope = {"type": "websocket", "path": path, "headers": [], "query_string": b"", "root_path": "", "subprotocols": []}
    await app(scope, receive, send)
    assert sent == ["websocket.close"]


@pytest.mark.parametrize("room", ["api", "http", "router", "deployments"])
def test_no_path_is_written_down_a_second_time(room: str) -> None:
    paths = {path.value for path in Path} - {Path.FRONT.value}  # a slash alone also parts names
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in sorted((PACKAGE / room).rglob("*.py"))
        if file != PACKAGE / "api" / "paths.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in paths
    ]
    assert found == []
