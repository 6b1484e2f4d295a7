"""Models, health, and the routes that are not there."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from serve_app.http.app import build_app
from serve_app.http.model_routes import NO_REPLICA
from serve_app.router.fleet import Fleet
from serve_app.router.link import QUIET_LOOKS
from serve_app.router.router import Router
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet("router-0", aliases={"fast": "org/tiny:sql"})
    backend = FakeBackend(replica_card("r0", model_card("org/tiny", adapter_card("sql"))))
    fleet.put(backend.card, backend)
    yield fleet
    await fleet.close()


@pytest.fixture
async def client(fleet) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(Router(fleet)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_models_lists_bases_adapters_and_aliases(client):
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [entry["id"] for entry in body["data"]] == ["org/tiny", "org/tiny:sql", "fast"]


@pytest.mark.parametrize("name", ["org/tiny", "org/tiny:sql", "fast"])
async def test_a_model_is_found_by_each_listed_name(client, name):
    response = await client.get(f"/v1/models/{name}")
    assert (response.status_code, response.json()["id"]) == (200, name)


async def test_an_unknown_model_is_a_404_and_a_loading_one_a_503(client, fleet):
    response = await client.get("/v1/models/nobody")
    assert (response.status_code, response.json()["error"]["error_code"]) == (404, "model_not_found")
    fleet.expect(["big"])
    response = await client.get("/v1/models/big")
    assert (response.status_code, response.json()["error"]["error_code"]) == (503, "model_loading")
    assert response.headers["retry-after"] == "5"


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_ok_once_every_known_model_has_a_replica(client, fleet, path):
    response = await client.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    fleet.expect(["org/tiny", "big"])
    response = await client.get(path)
    assert (response.status_code, response.json()) == (503, {"status": "loading", "models": ["big"]})
    assert response.headers["retry-after"] == "1"


async def test_a_router_is_ready_while_any_replica_is_heard_of_or_a_model_sleeps(client, fleet):
    fleet.expect(["org/tiny", "big"])
    assert ((await client.get("/ready")).status_code, (await client.get("/health")).status_code) == (200, 503)
    for _ in range(QUIET_LOOKS + 1):
        fleet.look()
    unready = await client.get("/ready")
    assert (unready.status_code, unready.headers["retry-after"]) == (503, "1")
    assert unready.json() == {"status": "unready", "reason": NO_REPLICA}
    fleet.rest("big", is_asleep=True)
    assert (await client.get("/ready")).json() == {"status": "ok"}


async def test_health_names_a_model_that_could_not_be_loaded_and_the_others_answer(client, fleet):
    fleet.expect(["org/tiny"], ["broken"])
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "failed", "models": [], "failed": ["broken"]})
    asked = {"prompt": "Once", "max_tokens": 1}
    assert (await client.post("/v1/completions", json={"model": "org/tiny", **asked})).status_code == 200
    refused = await client.post("/v1/completions", json={"model": "broken", **asked})
    assert (refused.status_code, refused.json()["error"]["error_code"]) == (503, "model_loading")
    assert "could not be loaded" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"]


@pytest.mark.parametrize("path", ["/v", "/v1", "/v1/completions/x", "/v1/completion", "/v1/model/"])
async def test_a_route_that_is_not_there_is_a_404_in_json(client, path):
    response = await client.get(path)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["type"]) == (404, "not_found_error")
    assert "x-request-id" in response.headers


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", {"POST"}),
        ("DELETE", "/v1/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/health", {"GET", "HEAD"}),
    ],
)
async def test_a_wrong_method_is_a_405_that_names_the_right_ones(client, method, path, allowed):
    response = await client.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed
    assert response.json()["error"]["error_code"] == "method_not_allowed"
