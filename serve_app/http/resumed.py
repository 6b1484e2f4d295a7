"""Answers with what replicas keep for a key: its streams, from where its client is, and capsules of completions."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from serve_app.api.dialects import DIALECTS
from serve_app.api.error_text import shown
from serve_app.api.parse import read_json_object
from serve_app.api.paths import Path
from serve_app.api.sse import dump
from serve_app.core.errors import MethodNotAllowed, NotFound
from serve_app.core.version import service_version
from serve_app.http.completions import Completions, Opened, time_limit_of
from serve_app.http.exchange import Exchange, route
from serve_app.http.model_routes import counted
from serve_app.http.settings import HttpSettings
from serve_app.http.styles import STYLES
from serve_app.router.capsules import capsule_body
from serve_app.router.places import NAME, Seen, read_places
from serve_app.router.resuming import Found, find
from serve_app.router.router import Router
from serve_app.router.story import Story


class ResumedStreams(Completions):
    """GET /v1/completions/{id}, with `Last-Event-ID` where the client has some of the stream."""

    async def _open(self, scope: Scope, body: bytes, exchange: Exchange, *, story: Story) -> Opened:
        if scope["method"] != "GET":  # to look at it would end it elsewhere
            raise MethodNotAllowed("A stream must be fetched with GET.", None, {"allow": "GET"})
        headers = Headers(scope=scope)
        limit_s = time_limit_of(headers)
        found = await find_kept(self._router, self._settings, scope["path_params"]["id"], story.identity.key_id)
        kept, style = found.kept, STYLES[Path(found.kept.path)]
        exchange.dialect = DIALECTS[kept.dialect]
        parsed = style.parse(self._router, kept.body, self._settings.limits, lambda model: exchange.dialect)
        drawn_by = found.first.request.client_request_id
        seeded = parsed.model_copy(update={"seed": kept.seed})
        request = self._settle(seeded, exchange, story, request_id=drawn_by, wants_kept=True)
        last_id = headers.get(NAME, "")
        seen = read_places(last_id, kept.secret) if last_id else Seen()
        run = self._router.resume(found, request, story.ticket, seen=seen.num_tokens, limit_s=limit_s)
        return Opened(request=request, run=run, style=style, created=kept.created, seen=seen)


async def find_kept(
    router: Router, settings: HttpSettings, asked: str, key_id: str, *, only_looks: bool = False
) -> Found:
    """Return what is kept for a key under the id of a response. Raises as `find`, and names the bound."""
    try:
        return await find(router.fleet, asked, key_id, only_looks=only_looks)
    except NotFound:
        seconds = settings.resume_s
        what = "a stream of this key, or an answer that it asked for with X-Capsule,"
        must = f"name {what} that runs, or that ended within {seconds:g} s (resume_s)"
        raise NotFound.refusing("id", must=must, found=shown(asked)) from None


def capsule_route(router: Router, settings: HttpSettings) -> Route:
    """Return the route of capsules."""

    async def capsule(request: Request) -> Response:
        key_id = request.scope["state"]["identity"].key_id
        found = await find_kept(router, settings, request.path_params["id"], key_id, only_looks=True)

        def written() -> str:
            sent = read_json_object(found.kept.body, max_depth=settings.limits.max_depth)
            return dump(capsule_body(found, sent, router.fleet.cards, service_version=service_version()))

        return Response(await asyncio.to_thread(written), media_type="application/json")

    return route(Path.CAPSULE, counted(capsule, router))
