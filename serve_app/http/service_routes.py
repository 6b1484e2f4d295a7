"""Routes about the service as a whole: its models, its dialects, its health."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.limits import WireLimits
from serve_app.api.listings import models_body
from serve_app.api.paths import Path
from serve_app.http.routes import route
from serve_app.router.router import Router

LOADING_RETRY_S = 1


def service_routes(router: Router, limits: WireLimits) -> list[Route]:
    """Open while the service is full: none of them waits for a replica."""

    async def models(request: Request) -> Response:
        return JSONResponse(models_body(router.models()))

    async def dialects(request: Request) -> Response:
        return JSONResponse(router.dialects(limits))

    async def model(request: Request) -> Response:
        return JSONResponse(router.model(request.path_params["id"]).body())

    async def health(request: Request) -> Response:
        if router.fleet.is_ready:
            return JSONResponse({"status": "ok"})
        has_only_failed = router.fleet.failed and not router.fleet.loading
        body = {"status": "failed" if has_only_failed else "loading", "models": router.view.loading}
        failed = {"failed": router.view.failed} if router.view.failed else {}
        return JSONResponse(body | failed, 503, {"retry-after": str(LOADING_RETRY_S)})

    return [
        route(Path.MODELS, models),
        route(Path.MODEL, model),
        route(Path.DIALECTS, dialects),
        route(Path.HEALTH, health),
        route(Path.V1_HEALTH, health),
    ]
