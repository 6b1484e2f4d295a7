"""Routes that publish adapters: vLLM's two, and those of administrators."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from serve_app.api.adapters import LoadCall, parse_load, parse_name
from serve_app.api.limits import WireLimits
from serve_app.api.paths import AdminPath, Path
from serve_app.core.adapters import PublishedAdapter
from serve_app.core.errors import InvalidRequest
from serve_app.core.tenants import LOCAL, Identity
from serve_app.http.admin_routes import query_of
from serve_app.http.exchange import body_of, route
from serve_app.router.publishing import Publisher, Publishing
from serve_app.router.rollouts import Rollouts

NAME = "lora_name"


def adapter_routes(
    publishing: Publishing, rollouts: Rollouts, *, limits: WireLimits, max_body_bytes: int
) -> list[Route]:
    """Return the routes. The guard decides who may call them.

    rollouts: what knows the figures of canaries

    vLLM's two are for keys of tenants, each for the names that it may publish under; the others are for administrators.
    """

    async def load(request: Request) -> Response:
        call = parse_load(await body_of(request, max_bytes=max_body_bytes), limits, path=Path.LOAD_ADAPTER)
        await _publish(publishing, call, _publisher(request))
        return PlainTextResponse(f"Success: LoRA adapter '{call.lora_name}' added successfully.")

    async def unload(request: Request) -> Response:
        name = parse_name(await body_of(request, max_bytes=max_body_bytes), limits, path=Path.UNLOAD_ADAPTER)
        await publishing.withdraw(name, _publisher(request))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def adapters(request: Request) -> Response:
        by = Publisher(key_id=_identity(request).key_id)
        sent = query_of(request, (NAME,) if request.method == "DELETE" else ())
        if request.method == "POST":
            call = parse_load(await body_of(request, max_bytes=max_body_bytes), limits, path=AdminPath.ADAPTERS)
            found = await _publish(publishing, call, by)
            return JSONResponse(asdict(rollouts.told(publishing.entry(found.base, found.name))))
        if request.method == "DELETE":
            if NAME not in sent:
                raise InvalidRequest.refusing(NAME, must="be base:adapter, in the query", found="nothing")
            return JSONResponse({"withdrawn": await publishing.withdraw(str(sent[NAME]), by)})
        data = [asdict(rollouts.told(each)) for each in publishing.listed()]
        return JSONResponse({"object": "list", "revision": publishing.known.revision, "data": data})

    async def rollback(request: Request) -> Response:
        name = parse_name(await body_of(request, max_bytes=max_body_bytes), limits, path=AdminPath.ROLLBACK)
        found = await publishing.roll_back(name, Publisher(key_id=_identity(request).key_id))
        return JSONResponse(asdict(rollouts.told(publishing.entry(found.base, found.name))))

    return [
        route(Path.LOAD_ADAPTER, load),
        route(Path.UNLOAD_ADAPTER, unload),
        Route(AdminPath.ADAPTERS, adapters, methods=["GET", "POST", "DELETE"]),
        Route(AdminPath.ROLLBACK, rollback, methods=["POST"]),
    ]


async def _publish(publishing: Publishing, call: LoadCall, by: Publisher) -> PublishedAdapter:
    return await publishing.publish(call.lora_name, call.lora_path, by, in_place=call.load_inplace, canary=call.canary)


def _publisher(request: Request) -> Publisher:
    identity = _identity(request)
    tenant = identity.tenant
    return Publisher(name=tenant.name, key_id=identity.key_id, rights=tenant.publishes)


def _identity(request: Request) -> Identity:
    identity: Identity = request.scope["state"].get("identity", LOCAL)
    return identity
