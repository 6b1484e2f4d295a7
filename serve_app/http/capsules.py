"""Answers with the capsule of a completion, from what replicas keep for the key that asked for it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve_app.api.parse import read_json_object
from serve_app.api.paths import Path
from serve_app.api.sse import dump
from serve_app.core.version import service_version
from serve_app.http.exchange import route
from serve_app.http.model_routes import counted
from serve_app.http.resumed import find_kept
from serve_app.http.settings import HttpSettings
from serve_app.router.capsules import capsule_body
from serve_app.router.router import Router


def capsule_route(router: Router, settings: HttpSettings) -> Route:
    """Return the route of capsules."""

    async def capsule(request: Request) -> Response:
        key_id = request.scope["state"]["identity"].key_id
        found = await find_kept(router, settings, request.path_params["id"], key_id, only_looks=True)
        sent = read_json_object(found.kept.body, max_depth=settings.limits.max_depth)
        body = capsule_body(found, sent, router.fleet.cards, service_version=service_version())
        return Response(await asyncio.to_thread(dump, body), media_type="application/json")

    return route(Path.CAPSULE, counted(capsule, router))
