"""Answers a client that fetches its stream anew, behind what it has of it or from the beginning."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Scope

from serve_app.api.dialects import DIALECTS
from serve_app.api.error_text import shown
from serve_app.core.errors import MethodNotAllowed, NotFound
from serve_app.http.completions import Completions, Opened, time_limit_of
from serve_app.http.exchange import Exchange
from serve_app.http.settings import HttpSettings
from serve_app.http.styles import Style
from serve_app.router.places import NAME, Seen, read_places
from serve_app.router.resuming import find
from serve_app.router.router import Router
from serve_app.router.story import Story


class ResumedStreams(Completions):
    """GET /v1/completions/{id}, with `Last-Event-ID` where the client has some of the stream.

    styles: of the routes whose streams are kept
    """

    def __init__(self, router: Router, settings: HttpSettings, styles: Mapping[str, Style]) -> None:
        super().__init__(router, settings, next(iter(styles.values())))
        self._styles = styles

    async def _open(self, scope: Scope, body: bytes, exchange: Exchange, *, story: Story) -> Opened:
        if scope["method"] != "GET":  # to look at it would end it elsewhere
            raise MethodNotAllowed("A stream must be fetched with GET.", None, {"allow": "GET"})
        asked, seconds, headers = scope["path_params"]["id"], self._settings.resume_s, Headers(scope=scope)
        limit_s = time_limit_of(headers)
        try:
            found = await find(self._router.fleet, asked, story.identity.key_id)
        except NotFound:
            must = f"name a stream of this key that runs, or that ended within {seconds:g} s (resume_s)"
            raise NotFound.refusing("id", must=must, found=shown(asked)) from None
        kept, style = found.kept, self._styles[found.kept.path]
        exchange.dialect = DIALECTS[kept.dialect]
        parsed = style.parse(kept.body, self._settings.limits, lambda model: exchange.dialect)
        drawn_by = found.first.request.client_request_id
        request = self._settle(parsed.model_copy(update={"seed": kept.seed}), exchange, story, request_id=drawn_by)
        last_id = headers.get(NAME, "")
        seen = read_places(last_id, kept.secret) if last_id else Seen()
        run = self._router.resume(found, request, story.ticket, seen=seen.num_tokens, limit_s=limit_s)
        return Opened(request=request, run=run, style=style, created=kept.created, seen=seen)
