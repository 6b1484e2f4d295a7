"""The HTTP application: bytes in, bytes out, every failure a JSON error; knows a router, not Ray."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.routing import Router as Routes
from starlette.types import ASGIApp

from serve_app.api.paths import Path
from serve_app.core.tenants import Tenant
from serve_app.http.adapter_routes import adapter_routes
from serve_app.http.admin_routes import NO_FILES, admin_routes
from serve_app.http.completions import Completions
from serve_app.http.exchange import ClientGone, raise_as_ours, route
from serve_app.http.file_routes import Batches, file_endpoints
from serve_app.http.guard import OPEN_DOOR, Door, Guard
from serve_app.http.idempotency import Idempotent
from serve_app.http.live import Live
from serve_app.http.metrics import CountedRequests, Metrics
from serve_app.http.middleware import Cors, FailuresAsJson, Filters, TrailingSlash
from serve_app.http.model_routes import answer_nobody, explain_route, model_routes, service_routes
from serve_app.http.pages import console_routes, description_route, front_route
from serve_app.http.resumed import ResumedStreams, capsule_route
from serve_app.http.settings import HttpSettings
from serve_app.http.styles import STYLES, Style
from serve_app.router.accounts import AccountsClient
from serve_app.router.idempotency import Replays
from serve_app.router.inquiries import Inquiries
from serve_app.router.publishing import Publishing
from serve_app.router.rollouts import Rollouts
from serve_app.router.router import Router


def build_app(
    router: Router,
    settings: HttpSettings | None = None,
    *,
    metrics: Metrics | None = None,
    door: Door = OPEN_DOOR,
    replays: Replays | None = None,
    book: AccountsClient | None = None,
    publishing: Publishing | None = None,
    batches: Batches | None = None,
) -> Starlette:
    """Return the whole service over HTTP, for any ASGI server.

    metrics: what to count in; one that outlives the application keeps counting when that is exchanged
    door:    who is let in;  replays: answers under an Idempotency-Key; None ignores those
    book:    in which several routers agree who answers under one
    publishing: of adapters; None publishes them for as long as the process lives;  batches: of tenants, with files
    """
    settings = settings or HttpSettings()
    publishing = publishing or Publishing(router.fleet)
    rollouts = router.rollouts or Rollouts(publishing, router.fleet)
    metrics = metrics or Metrics(
        router.fleet, admission=router.admission, rollouts=rollouts, tallies=router.shadows.tallies
    )
    live = Live(router.fleet, router.admission, max_stall_s=settings.max_stall_s)

    def routes_for(tenant: Tenant) -> ASGIApp:
        seen, own = router.seen_by(tenant), settings.for_tenant(tenant)
        found = routes(
            seen, own, metrics, door, replays=replays, live=live, book=book, publishing=publishing, batches=batches
        )
        return Routes(found, redirect_slashes=False)

    app = Starlette(
        middleware=[  # the outermost first
            Middleware(TrailingSlash),
            Middleware(CountedRequests, metrics=metrics),
            Middleware(Cors, origins=frozenset(settings.cors_origins), of_tenants=door.origins),
            Middleware(FailuresAsJson, sends_request_id=settings.sends_request_id, dialect=router.dialect),
            Middleware(Filters),
        ],
        exception_handlers={HTTPException: raise_as_ours, ClientGone: answer_nobody},
    )
    app.router.redirect_slashes, app.router.default = False, Guard(door, routes_for, router.admission.check_open)
    return app


def routes(
    router: Router,
    settings: HttpSettings,
    metrics: Metrics,
    door: Door = OPEN_DOOR,
    *,
    replays: Replays | None = None,
    live: Live | None = None,
    book: AccountsClient | None = None,
    publishing: Publishing | None = None,
    batches: Batches | None = None,
) -> list[Route]:
    """Return every route, as it answers a tenant that sees this router."""
    live = live or Live(router.fleet, router.admission, max_stall_s=settings.max_stall_s)
    publishing = publishing or Publishing(router.fleet)
    rollouts = router.rollouts or Rollouts(publishing, router.fleet)
    inquiries, administer = Inquiries(router.view), door.administer
    of_files = NO_FILES if administer is None or batches is None else file_endpoints(batches, administer, settings)
    return [
        *_completion_routes(router, settings, replays=replays, book=book),
        *model_routes(router, inquiries, limits=settings.limits, max_body_bytes=settings.max_body_bytes),
        explain_route(router, inquiries, limits=settings.limits, max_body_bytes=settings.max_body_bytes),
        *service_routes(router, settings.limits, door.identify),
        *adapter_routes(publishing, rollouts, limits=settings.limits, max_body_bytes=settings.max_body_bytes),
        description_route(settings.limits, router.dialect, asks_for_keys=not door.is_open),
        *admin_routes(administer, max_body_bytes=settings.max_body_bytes, of_files=of_files),
        route(Path.METRICS, metrics.answer),
        route(Path.LIVE, live),
        front_route(),
        *console_routes(),
    ]


def _completion_routes(
    router: Router, settings: HttpSettings, *, replays: Replays | None, book: AccountsClient | None
) -> list[Route]:
    """Return the routes of what is computed, and of streams that are fetched anew."""

    def answered(style: Style) -> ASGIApp:
        found = Completions(router, settings, style)
        if replays is None:
            return found
        return Idempotent(
            found,
            replays,
            max_body_bytes=settings.max_body_bytes,
            max_stall_s=settings.max_stall_s,
            book=book,
            rates=lambda: router.rates,
        )

    resumed = ResumedStreams(router, settings, STYLES[Path.COMPLETIONS])
    return [
        *(route(path, answered(style)) for path, style in STYLES.items()),
        *(route(path, resumed) for path in (Path.COMPLETION, Path.CHAT_COMPLETION)),
        capsule_route(router, settings),
    ]
