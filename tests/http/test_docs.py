"""GET /openapi.json costs a look-up: what is described alike is written once."""

from __future__ import annotations

import httpx

from serve_app.core.tenants import Identity, Tenant
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.http.pages import described
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router

MAX_N = {"a": 2, "b": 2, "c": 3}


def identify(key: str | None) -> Identity:
    return Identity(tenant=Tenant(name=key or "", max_n=MAX_N[key or ""]))


async def test_all_who_are_bound_alike_share_one_description() -> None:
    described.cache_clear()
    app = build_app(Router(Fleet("router-0")), door=Door(identify=identify))
    told = {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        for name in (*MAX_N, *MAX_N):
            answer = await client.get("/openapi.json", headers={"x-api-key": name})
            bounds = answer.json()["components"]["schemas"]["CompletionRequest"]["properties"]["n"]
            told[name] = (bounds["anyOf"][0]["maximum"], answer.headers["content-type"])
    assert told == {name: (max_n, "application/json") for name, max_n in MAX_N.items()}
    assert (described.cache_info().misses, described.cache_info().currsize) == (2, 2)
