"""The HTTP application: bytes in, bytes out, every failure a JSON error; knows a router, not Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.chunks import dump
from serve_app.api.dialects.dialect import Dialect
from serve_app.api.dialects.tables import HEADER, dialect_named
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.model_list import models_body
from serve_app.api.responses import ResponseHead
from serve_app.api.told import told_headers
from serve_app.core.errors import DeadlineExceeded, EngineFailed, ServeError
from serve_app.http.bodies import check_media_type
from serve_app.http.cors import cors
from serve_app.http.docs import docs_routes
from serve_app.http.encodings import ContentEncodings
from serve_app.http.exchange import CLIENT_CLOSED, ClientGone, Exchange, read_body, watch
from serve_app.http.framing import WholeForHttp10
from serve_app.http.headers import HeaderGate
from serve_app.http.metrics import Measured, Metrics, Served
from serve_app.http.model_routes import answer_nobody, model_routes
from serve_app.http.paths import TrailingSlash
from serve_app.http.refusals import dialect_heard, error_response, raise_as_ours
from serve_app.http.streams import Renderer, in_time, stream
from serve_app.http.styles import NativeStyle, OpenAiStyle, Style
from serve_app.http.upgrades import Upgrades
from serve_app.router.inquiries import Inquiries
from serve_app.router.router import Router
from serve_app.router.run import Run
from serve_app.router.story import Story

logger = logging.getLogger(__name__)

LOADING_RETRY_S = 1
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """What the wall allows.

    max_body_bytes:      of a request's body; more is refused while it is read
    keep_alive_s:        after so long without an event a stream gets a comment line
    max_stall_s, farewell_s: a client that reads nothing for so long is given up, and has so long to read why
    cors_origins:        pages of these origins may read responses; "*" is any, none is none
    sends_request_id:    whether `x-request-id` is put on responses; False where the server before it does so
    """

    max_body_bytes: int = 16 * 1024 * 1024
    keep_alive_s: float = 15.0
    max_stall_s: float = 60.0
    farewell_s: float = 5.0
    limits: WireLimits = DEFAULT_LIMITS
    cors_origins: tuple[str, ...] = ()
    sends_request_id: bool = True


def build_app(router: Router, settings: HttpSettings | None = None, *, metrics: Metrics | None = None) -> Starlette:
    """The whole service over HTTP, for any ASGI server.

    metrics: what to count in; one that outlives the application keeps counting when that is exchanged
    """
    settings = settings or HttpSettings()
    metrics = metrics or Metrics(router.fleet, admission=router.admission)

    async def models(request: Request) -> Response:
        return JSONResponse(models_body(router.models()))

    async def dialects(request: Request) -> Response:
        return JSONResponse(router.dialects())

    async def model(request: Request) -> Response:
        return JSONResponse(router.model(request.path_params["id"]).body())

    async def health(request: Request) -> Response:
        if router.fleet.is_ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse(
            {"status": "loading", "models": router.fleet.loading}, 503, {"retry-after": str(LOADING_RETRY_S)}
        )

    inquiries = Inquiries(router.fleet)
    native = Completions(router, settings, NativeStyle(inquiries))
    app = Starlette(
        routes=[
            Route("/v1/completions", Completions(router, settings, OpenAiStyle(router)), methods=["POST"]),
            Route("/completion", native, methods=["POST"]),
            Route("/completions", native, methods=["POST"]),
            Route("/v1/dialects", dialects, methods=["GET"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{id:path}", model, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/v1/health", health, methods=["GET"]),
            Route("/metrics", metrics.answer, methods=["GET"]),
            *docs_routes(settings.limits, router.dialect),
            *model_routes(inquiries, limits=settings.limits, max_body_bytes=settings.max_body_bytes),
        ],
        middleware=[
            Middleware(TrailingSlash),
            Middleware(Measured, metrics=metrics),
            *cors(settings.cors_origins),
            Middleware(Threshold, sends_request_id=settings.sends_request_id, dialect=router.dialect),
            Middleware(HeaderGate),
            Middleware(WholeForHttp10),
            Middleware(ContentEncodings),
            Middleware(Upgrades),
        ],
        exception_handlers={HTTPException: raise_as_ours, ClientGone: answer_nobody},
    )
    app.router.redirect_slashes = False
    return app


class Threshold:
    """What every request passes: it gets an id, and whatever goes wrong becomes a JSON error in the client's dialect.

    The id is the client's own `x-request-id` where that is well formed.
    dialect: of requests that name none
    """

    def __init__(self, app: ASGIApp, *, sends_request_id: bool, dialect: Dialect) -> None:
        self._app = app
        self._sends_request_id = sends_request_id
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if self._sends_request_id:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if has_started:
                raise
            response = error_response(_as_serve_error(error, request_id), dialect_heard(scope, self._dialect))
            await response(scope, receive, send_with_id)


class Completions:
    """Completions in one style as a raw ASGI application: the status line waits for the first event."""

    def __init__(self, router: Router, settings: HttpSettings, style: Style) -> None:
        self._router = router
        self._settings = settings
        self._style = style

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request and log one line, whatever happens."""
        story = Story(scope["state"]["request_id"])
        exchange = Exchange(send, self._router.dialect)
        has_left = True
        try:
            has_left = await self._serve(Headers(scope=scope), receive, exchange, story=story)
        finally:
            story.end()
            status = CLIENT_CLOSED if has_left else exchange.status
            logger.info(dump(story.facts(status)))
            scope["state"]["served"] = Served(status=status, run=story.run)

    async def _serve(self, headers: Headers, receive: Receive, exchange: Exchange, *, story: Story) -> bool:
        """Answer, but stop at once where the client leaves meanwhile; True where it did."""
        has_left = False
        try:
            async with asyncio.TaskGroup() as group:
                body = await self._read(headers, receive, exchange, story=story)
                if body is not None:
                    watcher = group.create_task(watch(receive, exchange))
                    await self._answer(headers, body, exchange, story=story)
                    watcher.cancel()
        except* ClientGone:
            has_left = True
        return has_left

    async def _read(self, headers: Headers, receive: Receive, exchange: Exchange, *, story: Story) -> bytes | None:
        """The body; None where the request was refused and the client was told.

        A full service refuses before it reads anything, as that is when refusing is cheapest.
        """
        try:
            exchange.dialect = _dialect_asked(headers) or self._style.dialect_of(None)
            story.ticket = self._router.admission.enter()
            check_media_type(headers)
            return await read_body(
                receive,
                content_length=headers.get("content-length"),
                max_bytes=self._settings.max_body_bytes,
            )
        except ServeError as error:
            story.error = error
            await exchange.fail(error)
            return None

    async def _answer(self, headers: Headers, body: bytes, exchange: Exchange, *, story: Story) -> None:
        """Run the request. Raises ClientGone; every other failure is told to the client."""

        def choose_dialect(model: object) -> Dialect:
            exchange.dialect = _dialect_asked(headers) or self._style.dialect_of(model)
            return exchange.dialect

        try:
            request = story.request = self._style.parse(body, self._settings.limits, choose_dialect)
            exchange.tell = lambda: told_headers(request, None if story.run is None else story.run.tally.usage)
            async with self._router.open(request, story.ticket) as run:
                story.run = run
                head = ResponseHead(id=run.response_id, created=int(time.time()), model=request.model)
                if request.stream:
                    renderer = self._style.renderer(run, request, head)
                    await self._stream(run, renderer, exchange, story=story)
                else:
                    await exchange.respond(200, await self._style.whole(run, request, head))
        except ClientGone:
            raise
        except Exception as error:
            story.error = _as_serve_error(error, story.request_id)
            with contextlib.suppress(DeadlineExceeded):  # who read nothing reads no error either
                await in_time(exchange.fail(story.error), self._settings.farewell_s)

    async def _stream(self, run: Run, renderer: Renderer, exchange: Exchange, *, story: Story) -> None:
        keep_alive_s, max_stall_s = self._settings.keep_alive_s, self._settings.max_stall_s
        await stream(run, renderer, exchange, story=story, keep_alive_s=keep_alive_s, max_stall_s=max_stall_s)


def _dialect_asked(headers: Headers) -> Dialect | None:
    name = headers.get(HEADER)
    return None if name is None else dialect_named(name)


def _request_id(headers: Headers) -> str:
    sent = headers.get("x-request-id", "")
    return sent if REQUEST_ID.fullmatch(sent) else secrets.token_hex(16)


def _as_serve_error(error: Exception, request_id: str) -> ServeError:
    """The error itself, or for one that nobody foresaw a plain failure; its details go to the log alone."""
    if isinstance(error, ServeError):
        return error
    logger.error("request %s failed", request_id, exc_info=error)
    return EngineFailed("The server failed to answer the request.")
