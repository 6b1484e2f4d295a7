"""Headers that would steer Serve are refused, all others pass."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from serve_app.core.errors import InvalidRequest
from serve_app.http.middleware import Filters


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


async def get(headers: dict[str, str]) -> httpx.Response:
    transport = httpx.ASGITransport(Filters(Starlette(routes=[Route("/", hello)])))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return await client.get("/", headers=headers)


@pytest.mark.parametrize(
    "name",
    [
        "X-Request-Timeout-Seconds",
        "x-request-disconnect-disabled",
        "serve_multiplexed_model_id",
        "Serve-Multiplexed-Model-Id",
    ],
)
async def test_a_header_that_steers_serve_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await get({name: "?1"})
    assert caught.value.param == name.lower().replace("_", "-")


async def test_other_headers_pass() -> None:
    response = await get({"authorization": "Bearer x", "x-request-id": "7", "x-stainless-timeout": "600"})
    assert response.text == "hello"
