"""Answers one request for completions: read, run, answer, and one line in the log whatever happens."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import Dialect
from serve_app.api.error_text import shown
from serve_app.api.paths import path_of
from serve_app.api.responses import ResponseHead, response_headers
from serve_app.api.sse import dump
from serve_app.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServeError
from serve_app.core.ledger import CLIENT_LEFT
from serve_app.core.request import Kept
from serve_app.http.exchange import (
    ClientGone,
    Exchange,
    RawHeaders,
    as_serve_error,
    check_media_type,
    dialect_asked,
    rate_headers,
    read_body,
    watched,
)
from serve_app.http.metrics import Served
from serve_app.http.settings import HttpSettings
from serve_app.http.streams import in_time, stream
from serve_app.http.styles import Style
from serve_app.router.chat import ResponseRenderer
from serve_app.router.places import MAX_CHOICES, Places, Seen
from serve_app.router.render import Rest, StreamRenderer
from serve_app.router.router import Router
from serve_app.router.run import Run
from serve_app.router.story import Story

logger = logging.getLogger(__name__)


EVENTS = "text/event-stream"
MAX_KEPT_BYTES = 4 << 20
"""Of a body; a stream that was asked for by a larger one cannot be fetched anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A request that is to be run.

    request: settled;  run: not started;  created: Unix seconds
    seen: what the client has of a stream that it fetches anew; None of any other
    """

    request: CompletionRequest
    run: Run
    style: Style
    created: int
    seen: Seen | None = None


class Completions:
    """Completions in one style as a raw ASGI application: the status line waits for the first event."""

    def __init__(self, router: Router, settings: HttpSettings, style: Style) -> None:
        self._router = router
        self._settings = settings
        self._style = style

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request and log one line, whatever happens."""
        story = Story(scope["state"]["request_id"], scope["state"]["identity"])
        exchange = Exchange(send, self._router.dialect)
        has_left = True
        try:
            has_left = await self._serve(scope, receive, exchange, story=story)
        finally:
            status = CLIENT_LEFT if has_left else exchange.status
            story.end(status, self._router.accounting)
            opened, rollouts = story.opened, self._router.rollouts
            if rollouts is not None and opened is not None and not (has_left or opened.is_resumed):
                rollouts.observe(opened, story.error)
            logger.info(dump(story.facts(status) | self._traced(story, status, scope)))
            if story.excerpts is not None:
                logger.info(dump(story.texts()))
            scope["state"]["served"] = Served(status=status, run=story.run, is_whole=story.error is None)

    def _traced(self, story: Story, status: int, scope: Scope) -> dict[str, str]:
        """Return the id of the request's trace for its line in the log; nothing where no traces are made."""
        if self._settings.trace is None:
            return {}
        trace_id = self._settings.trace(story, status, str(path_of(scope["path"]) or ""), scope["headers"])
        return {} if trace_id is None else {"trace_id": trace_id}

    async def _serve(self, scope: Scope, receive: Receive, exchange: Exchange, *, story: Story) -> bool:
        """Answer, and stop at once if the client leaves. Return whether it left."""
        has_left = False
        try:
            body = await self._read(Headers(scope=scope), receive, exchange, story=story)
            if body is not None:
                await watched(self._answer(scope, body, exchange, story=story), receive, exchange)
        except* ClientGone:
            has_left = True
        return has_left

    async def _read(self, headers: Headers, receive: Receive, exchange: Exchange, *, story: Story) -> bytes | None:
        """Return the body; None where the router refused the request and told the client.

        A full service refuses before it reads anything, as that is when refusing is cheapest.
        """
        try:
            exchange.dialect = self._dialect_of(None, headers)
            story.ticket = self._router.enter()
            story.ticket.key_id = story.identity.key_id
            check_media_type(headers)
            return await read_body(
                receive, content_length=headers.get("content-length"), max_bytes=self._settings.max_body_bytes
            )
        except ServeError as error:
            story.error = error
            if isinstance(error, Overloaded):
                await self._router.admission.may_tell()
            await exchange.fail(error)
            return None

    async def _answer(self, scope: Scope, body: bytes, exchange: Exchange, *, story: Story) -> None:
        """Run the request. Raises ClientGone; every other failure is told to the client."""
        try:
            assert story.ticket is not None, "it was let in"
            await story.ticket.turn()
            opened = await self._open(scope, body, exchange, story=story)
            await opened.run.in_turn(story.ticket.turn())
            story.models = tuple(dict.fromkeys(each.model.name for each in opened.run.requests))
            self._router.check_lengths(opened.run)
            story.permit = await self._router.reserve(opened.run)
            story.excerpt(opened.run)
            story.opened = opened.run
            async with opened.run as run:
                story.run = run  # from here on it is written down
                await self._tell(opened, Headers(scope=scope), exchange, story=story)
        except ClientGone:
            raise
        except Exception as error:
            story.error = as_serve_error(error, story.request_id)
            with contextlib.suppress(DeadlineExceeded):  # who read nothing reads no error either
                await in_time(exchange.fail(story.error), self._settings.farewell_s)

    async def _open(self, scope: Scope, body: bytes, exchange: Exchange, *, story: Story) -> Opened:
        """Read the body. Raises ServeError."""
        headers, created = Headers(scope=scope), int(time.time())

        def choose_dialect(model: object) -> Dialect:
            exchange.dialect = self._dialect_of(model, headers)
            return exchange.dialect

        def open_run() -> tuple[CompletionRequest, Run]:
            story.request = self._style.parse(self._router, body, self._settings.limits, choose_dialect)
            wants_kept = wants_capsule(headers) or story.request.stream
            request = self._settle(story.request, exchange, story, request_id=story.request_id, wants_kept=wants_kept)
            kept = self._kept(request, scope, body, created=created, story=story) if wants_kept else None
            run = self._router.open(request, story.ticket, request_id=story.request_id, limit_s=limit_s, kept=kept)
            return request, run

        limit_s = time_limit_of(headers)
        request, run = await self._router.once_awake(open_run, story.ticket, limit_s=limit_s)
        return Opened(request=request, run=run, style=self._style, created=created)

    def _dialect_of(self, model: object, headers: Headers) -> Dialect:
        """model: that was sent, whatever it is"""
        return dialect_asked(headers) or self._style.dialect or self._router.dialect_of(model)

    def _settle(
        self, request: CompletionRequest, exchange: Exchange, story: Story, *, request_id: str, wants_kept: bool
    ) -> CompletionRequest:
        """Return the request with what follows from its models.

        request_id: by which they are drawn for it;  wants_kept: its client is told whether it can be fetched anew
        """
        request = story.request = self._router.settled(request, request_id=request_id)
        exchange.tell = lambda: [*_headers_of(story, request, wants_kept=wants_kept), *rate_headers(self._router.rates)]
        return request

    def _kept(
        self, request: CompletionRequest, scope: Scope, body: bytes, *, created: int, story: Story
    ) -> Kept | None:
        """Return what replicas keep of a completion that is wanted again; None where that is nothing."""
        seconds = self._settings.resume_s if story.identity.tenant.resumes else 0.0
        can_be_kept = self._style.has_ids if request.stream else self._style.has_capsules
        if not (can_be_kept and seconds) or len(body) > MAX_KEPT_BYTES:
            return None
        return Kept(
            created=created,
            owner=story.identity.key_id,
            path=scope["path"],
            dialect=request.dialect.name,
            body=body,
            seed=request.seed,
            seconds=seconds,
        )

    async def _tell(self, opened: Opened, headers: Headers, exchange: Exchange, *, story: Story) -> None:
        """Send the response of a run that was entered."""
        request, run, seen = opened.request, opened.run, opened.seen
        head = ResponseHead(id=request.own_id(run.response_id), created=opened.created, model=request.model)
        if seen is None:
            self._router.shadow(request, run, request_id=story.request_id)
        if not request.stream:
            await exchange.respond(200, await opened.style.whole(self._router, run, request, head))
            return
        wants_ids = seen is not None or EVENTS in headers.get("accept", "")
        has_ids = wants_ids and opened.style.has_ids and request.num_choices <= MAX_CHOICES
        kept = run.requests[0].kept
        places = Places(request.num_choices, b"" if kept is None else kept.secret) if has_ids else None
        assert opened.style.renderer is not None, "vectors and scores are no stream"
        renderer = opened.style.renderer(self._router, run, request, head, places)
        if isinstance(renderer, ResponseRenderer):
            exchange.last_event = renderer.failed
        if seen is not None:
            assert isinstance(renderer, StreamRenderer), "others are not kept"
            renderer = Rest(renderer, seen)
        keep_alive_s, max_stall_s = self._settings.keep_alive_s, self._settings.max_stall_s
        await stream(run, renderer, exchange, story=story, keep_alive_s=keep_alive_s, max_stall_s=max_stall_s)


def _headers_of(story: Story, request: CompletionRequest, *, wants_kept: bool) -> RawHeaders:
    usage = None if story.run is None else story.run.stats.usage
    models = () if story.opened is None else [each.model for each in story.opened.requests]
    run = story.run
    is_kept = run.is_kept if run is not None and wants_kept else None
    return response_headers(request, usage, models, is_kept=is_kept)


NAME = "X-Request-Timeout"


def time_limit_of(headers: Headers) -> float | None:
    """Return the seconds that the client gives the request, or None. Raises InvalidRequest for no positive number."""
    text = headers.get(NAME)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest.refusing(NAME, must="be a number of seconds above 0", found=shown(text))
    return seconds


CAPSULE = "X-Capsule"


def wants_capsule(headers: Headers) -> bool:
    """Return whether an answer is to be kept though it is no stream. Raises InvalidRequest."""
    text = headers.get(CAPSULE)
    if text not in (None, "true"):
        raise InvalidRequest.refusing(CAPSULE, must='be "true" or be left out', found=shown(text))
    return text is not None
