"""Administration from bytes to bytes, over a real store; and what a tenant's own bounds do to its requests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import jsonschema
import pytest

from serve_app.api.openapi import openapi_document
from serve_app.api.paths import OF_ADAPTERS, OF_BATCHES, SERVICES, AdminPath
from serve_app.core.errors import Unavailable
from serve_app.core.tenants import Scope
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.http.settings import HttpSettings
from serve_app.router.router import Router
from serve_app.tenants.store import Author
from tests.flow.house import House, bearing


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    async with made.kept_open():
        yield made
    made.store.close()


@pytest.fixture
async def client(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=house.app), base_url="http://door") as client:
        yield client


@pytest.fixture
async def admin(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=house.app), base_url="http://door", headers=bearing(house.admin)
    ) as client:
        yield client


WALK = [(path, method) for path, method in SERVICES]


def address(path: str) -> str:
    return path.replace("{name}", "nobody").replace("{id}", "nobody")


@pytest.mark.parametrize(("path", "method"), [each for each in WALK if each[0].scope is Scope.ADMIN])
async def test_every_route_of_administrators_wants_a_key_of_theirs(
    house: House, client: httpx.AsyncClient, path: AdminPath, method: str
) -> None:
    refused = await client.request(method, address(path))
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    others = house.key("acme")
    assert (await client.request(method, address(path), headers=others)).status_code == 403
    everything = house.admin_service.answer(
        "create_key",
        {"tenant": "acme", "scopes": sorted(set(Scope) - {Scope.ADMIN})},
        Author(name="test", at=0.0),
    )
    assert (await client.request(method, address(path), headers=bearing(str(everything["key"])))).status_code == 403


async def test_a_team_gets_a_key_and_loses_it(client: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
    declared = {"name": "acme", "models": ["tiny"], "limits": {"max_in_flight": 4}}
    assert (await admin.post("/admin/tenants", json=declared)).json()["limits"]["max_in_flight"] == 4
    made = await admin.post("/admin/keys", json={"tenant": "acme"})
    assert made.headers["cache-control"] == "no-store"
    key, body = made.json()["key"], {"model": "tiny", "prompt": "a", "max_tokens": 1}
    assert (await client.post("/v1/completions", json=body, headers=bearing(key))).status_code == 200
    assert key not in (await admin.get("/admin/keys")).text
    new = (await admin.post(f"/admin/keys/{made.json()['id']}/rotate", json={"overlap_s": 0})).json()
    for each, status in ((key, 401), (new["key"], 200)):
        answered = await client.post("/v1/completions", json=body, headers=bearing(each))
        assert answered.status_code == status
    assert (await admin.delete(f"/admin/keys/{new['id']}")).json()["revoked_at"] is not None
    assert (await client.post("/v1/completions", json=body, headers=bearing(new["key"]))).status_code == 401
    events = (await admin.get("/admin/events")).json()["data"]
    actions = [each["action"] for each in events]
    assert actions[-5:] == ["add tenant", "create key", "create key", "end key", "end key"]
    assert (await admin.get(f"/admin/events?after={events[-2]['id']}")).json()["data"] == events[-1:]


async def test_the_form_of_an_answer_is_no_member_of_a_body(admin: httpx.AsyncClient) -> None:
    await admin.post("/admin/tenants", json={"name": "acme"})
    made = (await admin.post("/admin/keys", json={"tenant": "acme"})).json()
    before = len((await admin.get("/admin/events")).json()["data"])
    asked = [
        ("POST", "/admin/keys", {"tenant": "acme"}),
        ("POST", f"/admin/keys/{made['id']}/rotate", {"overlap_s": 0}),
        ("POST", "/admin/tenants", {"name": "beta"}),
        ("PATCH", "/admin/tenants/acme", {"weight": 2}),
        ("PUT", "/admin/tenants", {"tenants": []}),
    ]
    for method, path, body in asked:
        for form in ("csv", "json", "odd"):
            refused = await admin.request(method, path, json={**body, "format": form})
            assert refused.status_code == 400, (path, form, refused.text)
    assert len((await admin.get("/admin/events")).json()["data"]) == before


async def test_answers_are_as_they_are_described(admin: httpx.AsyncClient) -> None:
    document = (await admin.get("/openapi.json")).json()
    made: dict[str, str] = {}
    bodies: dict[str, object] = {
        "add_tenant": {"name": "acme"},
        "apply_tenants": {"tenants": [{"name": "acme", "weight": 2}, {"name": "beta"}]},
        "set_tenant": {"max_n": 3},
        "create_key": {"tenant": "acme", "scopes": ["infer", "metrics"], "lifetime_s": 60},
        "rotate_key": {"overlap_s": 5},
    }
    order = ["add_tenant", "apply_tenants", "set_tenant", "create_key", "rotate_key", "revoke_key"]
    named = {service.name: each for each, service in SERVICES.items() if each[0] not in OF_ADAPTERS | OF_BATCHES}
    for name in [*order, *sorted(named.keys() - {*order, "remove_tenant"}), "remove_tenant"]:
        path, method = named[name]
        target = path.replace("{name}", "acme").replace("{id}", made.get("id", ""))
        response = await admin.request(method, target, json=bodies.get(name))
        assert response.status_code == 200, (name, response.text)
        content = document["paths"][path.value][method.lower()]["responses"]["200"]["content"]
        schema = {**content["application/json"]["schema"], "components": document["components"]}
        jsonschema.validate(response.json(), schema)
        made = made or ({"id": response.json()["id"]} if name == "create_key" else {})


async def test_what_is_wrong_is_refused_by_name_and_changes_nothing(admin: httpx.AsyncClient) -> None:
    before = (await admin.get("/admin/events")).json()
    wrong: list[tuple[str, str, object, int, str]] = [
        ("POST", "/admin/tenants", {"name": "a b"}, 400, "name must"),
        ("POST", "/admin/tenants", {"name": "a", "colour": 1}, 400, "colour"),
        ("POST", "/admin/tenants", [], 400, "JSON object"),
        ("PATCH", "/admin/tenants/nobody", {"weight": 2}, 404, "no tenant"),
        ("PATCH", "/admin/tenants/administrators", {"name": "other"}, 400, "name"),
        ("GET", "/admin/tenants/nobody", None, 404, "no tenant"),
        ("DELETE", "/admin/tenants/nobody", None, 404, "no tenant"),
        ("POST", "/admin/keys", {"tenant": "nobody"}, 404, "no tenant"),
        ("POST", "/admin/keys", {}, 400, "tenant"),
        ("POST", "/admin/keys/nobody/rotate", {"overlap_s": -1}, 400, "overlap_s"),
        ("DELETE", "/admin/keys/nobody", None, 404, "no key"),
        ("GET", "/admin/events?after=x", None, 400, "after"),
        ("GET", f"/admin/events?after={'9' * 30}", None, 400, "after"),
        ("GET", f"/admin/events?after={'9' * 5000}", None, 400, "after"),
        ("GET", "/admin/keys?colour=red", None, 400, "query"),
        ("PUT", "/admin/tenants", {"tenants": [{"name": "a"}, {"name": "a"}]}, 400, "twice"),
        ("POST", "/admin/tenants", {"name": "x" * 60_000}, 413, "body"),
        ("POST", "/admin/events", {}, 405, "GET"),
        ("GET", "/admin/nothing", None, 404, "no route"),
    ]
    for method, path, body, status, said in wrong:
        response = await admin.request(method, path, json=body)
        assert response.status_code == status, (path, response.text)
        assert said in response.json()["error"]["message"], response.text
    assert (await admin.get("/admin/events")).json() == before


async def test_without_keys_nothing_is_administered_and_each_route_says_what_is_missing(house: House) -> None:
    app = build_app(Router(house.fleet))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://door") as anyone:
        for path, method in SERVICES.keys() - {each for each in SERVICES if each[0] in OF_ADAPTERS}:
            refused = await anyone.request(method, address(path), headers=bearing(house.admin))
            assert refused.status_code == 404
            for needed in (f"{method} ", "`store: sqlite:///", "`files`", "`serve_app keys create`"):
                assert needed in refused.json()["error"]["message"]
        described = (await anyone.get("/openapi.json")).json()
    assert {path for path in described["paths"] if "admin" in path} == OF_ADAPTERS
    assert "security" not in described
    plain = openapi_document(HttpSettings().limits, Router(house.fleet).dialect)
    assert described == plain


@pytest.mark.parametrize(
    ("sent", "asked", "status"),
    [
        ({"max_tokens": 5}, 5, 200),
        ({"max_tokens": 6}, None, 400),
        ({"max_tokens": -1}, 5, 200),
        ({"max_completion_tokens": 9}, None, 400),
        ({"max_tokens": 0}, 0, 200),
        ({}, 5, 200),
        ({"max_tokens": None}, 5, 200),
    ],
)
async def test_no_completion_is_longer_than_the_tenants(
    house: House, client: httpx.AsyncClient, sent: dict[str, int], asked: int | None, status: int
) -> None:
    headers = house.key("short", max_tokens=5)
    body = {"model": "tiny", "prompt": "a", **sent}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == status, response.text
    if status == 400:
        assert response.json()["error"]["param"] == next(iter(sent))
        assert "at most 5 with this key" in response.json()["error"]["message"]
        assert house.backend.submissions == []
    else:
        assert house.backend.submissions[0][0].stop.max_tokens == asked


async def test_a_chat_without_a_bound_gets_the_tenants(house: House, client: httpx.AsyncClient) -> None:
    headers = house.key("short", max_tokens=5)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    assert house.backend.submissions[0][0].stop.max_tokens == 5


PAGE = "https://app.acme.example"


def preflight(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }


async def test_pages_of_a_tenant_may_read_its_answers_and_no_other_pages(
    house: House, client: httpx.AsyncClient
) -> None:
    acme, beta = house.key("acme", cors_origins=[PAGE]), house.key("beta")
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    for origin, is_known in ((PAGE, True), ("https://console.example", True), ("https://evil.example", False)):
        answered = await client.options("/v1/completions", headers=preflight(origin))
        assert (answered.headers.get("access-control-allow-origin") == origin) is is_known
        assert answered.status_code == (200 if is_known else 400)
    readers = {}
    for name, headers in (("acme", acme), ("beta", beta), ("nobody", {})):
        for origin in (PAGE, "https://console.example", "https://evil.example"):
            response = await client.post("/v1/completions", json=body, headers={**headers, "origin": origin})
            readers[name, origin] = response.headers.get("access-control-allow-origin") == origin
            assert "Origin" in response.headers["vary"]
            assert "access-control-allow-credentials" not in response.headers
    console = {(name, "https://console.example") for name in ("acme", "beta", "nobody")}
    assert {each for each, may_read in readers.items() if may_read} == console | {("acme", PAGE), ("nobody", PAGE)}


async def test_a_page_can_read_that_its_key_is_good_for_nothing_or_not_for_this(
    house: House, client: httpx.AsyncClient
) -> None:
    acme = house.key("acme", cors_origins=[PAGE])
    for headers, status in ((bearing("sa-old"), 401), (acme, 403)):
        refused = await client.get("/admin/keys", headers={**headers, "origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (status, PAGE)


async def test_a_tenant_without_models_is_told_so_and_not_to_come_again(
    house: House, client: httpx.AsyncClient
) -> None:
    headers = house.key("acme", models=[])
    refused = await client.post("/tokenize", json={"content": "a"}, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == '"model" must be one that may be used, and none may; found nothing.'


async def test_who_cannot_be_asked_about_is_told_to_come_again(house: House) -> None:
    def unknown(key: str | None) -> object:
        raise Unavailable("nobody knows", None, {"retry_after_s": 2})

    app = build_app(Router(house.fleet), door=Door(identify=unknown))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://door") as anyone:
        refused = await anyone.get("/v1/models", headers=bearing(house.admin))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert (await anyone.get("/health")).status_code == 200


@pytest.mark.law("Keys")
async def test_no_key_reaches_a_log_a_metric_or_a_body(
    house: House, client: httpx.AsyncClient, admin: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    headers = house.key("acme")
    secrets = [headers["authorization"][10:], house.admin[3:], "x" * 43]
    told = []
    for sent in (headers, {"x-api-key": f"sa-{secrets[2]}"}, {"authorization": f"Bearer sa-{secrets[2]}"}):
        for body in ({"model": "tiny", "prompt": "a"}, {"model": sent.get("authorization", "m"), "prompt": 5}):
            told.append((await client.post("/v1/completions", json=body, headers=sent)).text)
    told += [(await admin.get(path)).text for path in ("/metrics", "/admin/keys", "/admin/events", "/admin/tenants")]
    told += [record.getMessage() for record in caplog.records]
    assert not [secret for secret in secrets for each in told if secret in each]
    assert any('"tenant":"acme"' in each for each in told)


@pytest.mark.parametrize(
    "sent",
    [
        "sa-' OR '1'='1",
        "sa-" + "a" * 43 + "'; DROP TABLE keys; --",
        "sa-" + "\u202e" * 43,
        "sa-%00" + "a" * 39,
        "a" * 60_000,
    ],
)
async def test_a_key_is_never_part_of_a_statement(
    house: House, client: httpx.AsyncClient, admin: httpx.AsyncClient, sent: str
) -> None:
    """As the injection through the refusal of a key in a proxy for models was (CVE-2026-42208)."""
    house.key("acme")
    response = await client.get("/v1/models", headers={"authorization": b"Bearer " + sent.encode()})  # type: ignore[dict-item]
    assert response.status_code == 401
    assert len((await admin.get("/admin/keys?tenant=acme")).json()["data"]) == 1
    quoted = await admin.get("/admin/keys", params={"tenant": "' OR '1'='1"})
    assert quoted.status_code == 404


@pytest.mark.law("The door")
@pytest.mark.parametrize(
    "path",
    [
        "/invocations", "/tokenize", "/detokenize", "/pause", "/resume", "/update_weights", "/load_lora_adapter",
        "/v1/load_lora_adapter", "/metrics", "/docs/x", "/openapi.json", "/props", "/lora-adapters", "/server_info",
        "/v1/../metrics", "/health/../metrics", "//health", "/health/x", "/healthz", "/HEALTH", "/admin/../health",
        "/health;a", "/health%2f..%2fmetrics",
    ],
)  # fmt: skip
async def test_no_address_is_outside_of_the_door(client: httpx.AsyncClient, path: str) -> None:
    """As doors that guard a list of prefixes leave the others open (`--api-key` of vLLM)."""
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
        response = await client.request(method, f"{client.base_url}".rstrip("/") + path)
        normalised = response.request.url.path
        assert response.status_code == 401 or normalised.rstrip("/") == "/health", (method, path)
