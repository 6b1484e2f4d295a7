"""Keys at the door, from bytes to bytes: who gets in, what is there for whom, and what is said to the others."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serve_app.api.paths import OPEN, AdminPath, Path
from serve_app.core.shares import Share
from serve_app.core.tenants import Identity, Rights, Scope, Tenant
from serve_app.deployments.arguments import RouterSettings
from serve_app.deployments.router import door_for
from serve_app.http.app import build_app
from serve_app.http.guard import OPEN_DOOR, Door, anybody, door_without_keys, heard_all
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from serve_app.tenants.keys import Directory, Key, KeyCache, digest_of, new_key
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card

PEPPER = b"p" * 32
ALL = frozenset(Scope)
TENANTS = {
    "whole": Tenant(name="whole"),
    "base": Tenant(name="base", rights=Rights(("tiny",))),
    "pirate": Tenant(name="pirate", rights=Rights(("tiny:pirate",)), max_n=2),
    "none": Tenant(name="none", rights=Rights(())),
    "nowhere": Tenant(name="nowhere", rights=Rights(("*:nope",))),
}
SECRETS = {name: new_key() for name in TENANTS}


def directory() -> Directory:
    keys = [
        Key(id=f"key-{name}", tenant=name, digest=digest_of(secret, PEPPER), scopes=ALL, created_at=0.0)
        for name, secret in SECRETS.items()
    ]
    for scope in Scope:
        SECRETS.setdefault(f"only {scope}", new_key())
        digest = digest_of(SECRETS[f"only {scope}"], PEPPER)
        keys.append(Key(id=f"{scope}", tenant="whole", digest=digest, scopes=frozenset({scope}), created_at=0.0))
    return Directory(TENANTS.values(), keys, pepper=PEPPER)


@pytest.fixture
async def backend() -> FakeBackend:
    cards = adapter_card("pirate"), adapter_card("json")
    return FakeBackend(replica_card("r0", model_card("tiny", *cards)))


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    fleet = Fleet("router-0", aliases={"prod": "tiny:json", "sea": "tiny:pirate"})
    fleet.put(backend.card, backend)
    fleet.put(replica_card("r1", model_card("other")), FakeBackend(replica_card("r1", model_card("other"))))
    fleet.expect(["tiny", "other", "coming"])
    known = directory()
    app = build_app(Router(fleet, RouterConfig()), door=Door(identify=lambda key: known.identify(key, 1.0)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://door") as client:
        yield client
    await fleet.close()


@pytest.mark.parametrize("is_made", [True, False], ids=["made", "not made"])
async def test_a_key_that_was_made_elsewhere_a_moment_ago_is_heard_of_before_it_is_refused(is_made: bool) -> None:
    known = [Directory([], [], pepper=PEPPER)]
    looked_for = []

    async def look_again(presented: str) -> None:
        looked_for.append(presented)
        if is_made:
            known[:] = [directory()]

    door = Door(identify=lambda key: known[0].identify(key, 1.0), look_again=look_again)
    app = build_app(Router(Fleet("router-0"), RouterConfig()), door=door)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://door") as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert not looked_for, "without a key there is none to hear of"
        answers = [await client.get("/v1/models", headers=key("whole")) for _ in range(2)]
    assert [answer.status_code for answer in answers] == ([200, 200] if is_made else [401, 401])
    assert looked_for == [SECRETS["whole"]] * (1 if is_made else 2)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {SECRETS[name]}"}


def whole(path: str) -> str:
    """The address of a path, where two slashes in front would name a host."""
    return f"http://door{path}"


def asking(model: str, **more: object) -> dict[str, object]:
    return {"model": model, "prompt": "a b", "max_tokens": 2, **more}


@pytest.mark.law("The door")
@pytest.mark.parametrize("path", [*Path, "/v", "/nothing", "/admin", "/v1/completions/", "//metrics"])
async def test_no_route_but_health_front_and_the_consoles_files_answers_without_a_key(
    client: httpx.AsyncClient, path: str
) -> None:
    for method in ("GET", "POST", "HEAD", "PUT", "DELETE"):
        response = await client.request(method, whole(path.replace("{id}", "tiny").replace("{file}", "main.js")))
        if path in OPEN:
            assert response.status_code != 401
        else:
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


async def test_gateways_read_queues_without_a_key_where_the_operator_says_so_and_no_tenants(backend) -> None:
    known = directory()
    accounts: Any = SimpleNamespace(
        identify=lambda key: known.identify(key, 1.0), look_again=heard_all, origins=frozenset, administer=None
    )
    door = door_for(RouterSettings(auth="keys", gateway_metrics=True), accounts, "0.0.0.0")
    fleet = Fleet("router-0")
    fleet.put(backend.card, backend)
    transport = httpx.ASGITransport(app=build_app(Router(fleet), door=door))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        told = await client.get("/metrics")
        assert (told.status_code, (await client.get("/metrics", headers=key("only infer"))).status_code) == (200, 403)
        assert "serve_app_" in (await client.get("/metrics", headers=key("only metrics"))).text
        assert [(await client.get(path)).status_code for path in ("/live", "/v1/models")] == [401, 401]
    await fleet.close()
    series = [line for line in told.text.splitlines() if not line.startswith("#")]
    assert len(series) == 5
    assert all(line.startswith("vllm:") for line in series)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sa-" + "x" * 43},
        {"authorization": "Basic dXNlcjpwYXNz"},
        {"authorization": "Bearer"},
        {"x-api-key": "sk-anything"},
        {"authorization": "bearer " + "é" * 9},
    ],
)
async def test_a_wrong_key_is_told_so_in_the_shape_of_the_dialect(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    response = await client.post("/v1/completions", json=asking("tiny"), headers=sent)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_key_opens_the_door_in_either_header(client: httpx.AsyncClient, header: str) -> None:
    value = SECRETS["whole"] if header == "x-api-key" else f"bEaReR {SECRETS['whole']}"
    response = await client.post("/v1/completions", json=asking("tiny"), headers={header: value})
    assert response.status_code == 200


async def test_health_is_open_and_names_no_model(client: httpx.AsyncClient) -> None:
    response = await client.get("/health")
    assert (response.status_code, response.json()["models"]) == (503, [])


async def test_a_router_that_knows_no_keys_is_not_ready(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert (await client.get("/ready")).json() == {"status": "ok"}
    held, fleet = KeyCache(grace_s=10.0), Fleet("router-0")
    fleet.put(backend.card, backend)
    door = Door(identify=lambda key: held.identify(key, now=1.0, at=1.0))
    transport = httpx.ASGITransport(app=build_app(Router(fleet, RouterConfig()), door=door))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as alone:
        response = await alone.get("/ready")
        assert (response.status_code, "whose keys" in response.json()["reason"]) == (503, True)
    await fleet.close()


async def test_a_router_that_stood_still_hears_of_keys_anew_before_it_refuses(backend: FakeBackend) -> None:
    held, fleet, now = KeyCache(grace_s=10.0), Fleet("router-0"), [0.0]
    fleet.put(backend.card, backend)

    async def look_again(presented: str) -> None:
        held.hear(directory(), now[0])

    await look_again("")
    now[0] = 3600.0
    door = Door(identify=lambda key: held.identify(key, now=1.0, at=now[0]), look_again=look_again)
    transport = httpx.ASGITransport(app=build_app(Router(fleet, RouterConfig()), door=door))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        response = await client.post("/v1/completions", json=asking("tiny"), headers=key("whole"))
    assert response.status_code == 200
    await fleet.close()


@pytest.mark.parametrize("path", [each for each in Path if each not in OPEN])
async def test_a_key_is_good_for_its_scopes_and_no_other(client: httpx.AsyncClient, path: Path) -> None:
    for scope in Scope:
        response = await client.request(path.method, path.replace("{id}", "tiny"), headers=key(f"only {scope}"))
        is_allowed = path.scope in (None, scope)
        assert (response.status_code == 403) is not is_allowed, (path, scope, response.text)


@pytest.mark.parametrize("path", [each for each in (*Path, *AdminPath) if each is not Path.MODEL])
@pytest.mark.parametrize("behind", ["%0A", "%0A/", "%00", "%85"])
async def test_what_is_only_nearly_a_path_of_ours_is_none(
    backend: FakeBackend, path: Path | AdminPath, behind: str
) -> None:
    """Routes are found by patterns whose end may stand before a newline: no scope is known for such a path."""
    known, fleet = directory(), Fleet("router-0")
    fleet.put(backend.card, backend)
    administered: list[str] = []

    async def administer(service: str, arguments: object, key_id: str) -> dict[str, object]:
        administered.append(service)
        return {}

    door = Door(identify=lambda key: known.identify(key, 1.0), administer=administer)
    transport = httpx.ASGITransport(app=build_app(Router(fleet, RouterConfig()), door=door))
    named = re.sub(r"\{file\}", "main.js", path).replace("{id}", "a").replace("{name}", "a") + behind
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        for scope in Scope:
            for method in ("GET", "POST", "PATCH", "PUT", "DELETE"):
                response = await client.request(method, named, headers=key(f"only {scope}"))
                is_its_own = "{" in path and scope is path.scope  # whatever stands for a name is a name
                assert response.status_code in (403, 404) or is_its_own, (method, scope, response.text)
        assert (await client.get(named)).status_code == 401
    assert not administered or "{" in path
    await fleet.close()


@pytest.mark.parametrize("path", [each for each in Path if each not in OPEN])
async def test_scopes_hold_where_the_service_is_mounted_below_a_prefix(backend: FakeBackend, path: Path) -> None:
    known, fleet = directory(), Fleet("router-0")
    fleet.put(backend.card, backend)
    app = build_app(Router(fleet, RouterConfig()), door=Door(identify=lambda key: known.identify(key, 1.0)))
    transport = httpx.ASGITransport(app=app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://door/llm") as client:
        assert (await client.get("/health")).status_code in (200, 503)
        assert (await client.get("/console/main.js")).status_code == 200
        for scope in Scope:
            response = await client.request(path.method, path.replace("{id}", "tiny"), headers=key(f"only {scope}"))
            is_allowed = path.scope in (None, scope)
            assert (response.status_code == 403) is not is_allowed, (path, scope, response.text)
            assert response.status_code != 404 or "{id}" in path, response.text
    await fleet.close()


@pytest.mark.parametrize(
    ("tenant", "listed"),
    [
        ("whole", ["other", "tiny", "tiny:json", "tiny:pirate", "prod", "sea"]),
        ("base", ["tiny"]),
        ("pirate", ["sea", "tiny:pirate"]),
        ("none", []),
        ("nowhere", []),
    ],
)
async def test_what_may_not_be_used_is_not_listed(client: httpx.AsyncClient, tenant: str, listed: list[str]) -> None:
    body = (await client.get("/v1/models", headers=key(tenant))).json()
    assert sorted(entry["id"] for entry in body["data"]) == sorted(listed)


@pytest.mark.law("The door")
@pytest.mark.parametrize(
    ("tenant", "hidden", "invented"),
    [
        ("base", "other", "nowhere"),
        ("base", "tiny:json", "tiny:nope"),
        ("base", "prod", "nope"),
        ("base", "json", "nope"),
        ("base", "coming", "leaving"),
        ("base", "tiny:json*0.5", "tiny:nope*0.5"),
        ("pirate", "tiny", "nope"),
        ("pirate", "tiny:json", "tiny:nope"),
        ("pirate", "tiny:pirate+json", "tiny:pirate+nope"),
        ("pirate", "prod", "nope"),
        ("pirate", "other", "nope"),
        ("none", "tiny", "nope"),
        ("none", "tiny:pirate", "nope:pirate"),
        ("nowhere", "tiny:x", "nope:x"),
        ("nowhere", "tiny::x", "nope::x"),
        ("nowhere", "tiny", "nope"),
        ("nowhere", "tiny:nope", "other:nope"),
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/v1/models/"]
)
async def test_what_may_not_be_used_is_refused_in_the_words_of_what_never_was(
    client: httpx.AsyncClient, path: str, tenant: str, hidden: str, invented: str
) -> None:
    async def said(model: str) -> tuple[int, str]:
        if path.endswith("/"):
            response = await client.get(path + model, headers=key(tenant))
        else:
            body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a", "content": "a"}
            names = {"/v1/completions": ["prompt"], "/v1/chat/completions": ["messages"], "/v1/embeddings": ["input"]}
            chosen = {name: body[name] for name in names.get(path, ["content"])}
            response = await client.post(path, json={"model": model, **chosen}, headers=key(tenant))
        words = response.text.replace(model, "MODEL")
        for name in ("json", "nope"):
            words = words.replace(name, "ADAPTER")
        return response.status_code, words

    status, words = await said(hidden)
    assert (status, words) == await said(invented)
    assert status == (400 if (tenant, hidden[:5]) == ("base", "tiny:") else 404), "without any adapter there is no LoRA"


async def test_the_way_to_an_adapter_leads_past_a_hidden_base(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    asked = [asking(model) for model in ("tiny:pirate", "pirate", "sea", "tiny:pirate*0.5")]
    asked += [{**asking("tiny"), name: "pirate"} for name in ("adapter", "lora_path")]
    asked += [{**asking("tiny:pirate"), "adapter": "pirate"}]
    for body in asked:
        response = await client.post("/v1/completions", json=body, headers=key("pirate"))
        assert response.status_code == 200, response.text
    for changes in ({"model": "tiny:pirate*0"}, {"model": "tiny", "lora": [{"id": 0, "scale": 0}]}, {"model": "tiny"}):
        response = await client.post("/v1/completions", json={**asking(""), **changes}, headers=key("pirate"))
        assert response.status_code == 404, response.text  # nothing of an adapter is the base
    assert {request.model.parts[0].adapter for requests in backend.submissions for request in requests} == {"pirate"}


async def test_a_list_of_models_is_answered_if_all_of_them_may_be_used(client: httpx.AsyncClient) -> None:
    both = {**asking(""), "model": ["tiny", "tiny:pirate"]}
    assert (await client.post("/v1/completions", json=both, headers=key("whole"))).status_code == 200
    assert (await client.post("/v1/completions", json=both, headers=key("base"))).status_code == 400


async def test_a_tenants_own_bound_holds_beside_the_services(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=asking("tiny:pirate", n=3), headers=key("pirate"))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    response = await client.post("/v1/completions", json=asking("tiny:pirate", n=2), headers=key("pirate"))
    assert response.status_code == 200


async def test_a_request_carries_its_tenants_share(backend: FakeBackend) -> None:
    fleet = Fleet("router-0")
    fleet.put(backend.card, backend)
    tenant = Tenant(name="acme", weight=3.0, priority="interactive")
    for identify in (lambda key: Identity(tenant=tenant), anybody):
        app = build_app(Router(fleet), door=Door(identify=identify))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://door") as client:
            await client.post("/v1/completions", json=asking("tiny"))
    await fleet.close()
    shares = [requests[0].share for requests in backend.submissions]
    assert shares == [Share(flow="acme", weight=3.0, priority="interactive"), Share()]


async def test_tenants_find_no_prefixes_of_each_other_unless_they_share_a_group(backend: FakeBackend) -> None:
    fleet = Fleet("router-0")
    fleet.put(backend.card, backend)
    router = Router(fleet)
    grouped = [Tenant(name=name, cache_group="lab") for name in ("a", "b")]
    alone = [Tenant(name="a"), Tenant(name="b"), Tenant(name="lab")]
    salts = []
    for tenant in (*grouped, *alone):
        app = build_app(router, door=Door(identify=lambda key, who=tenant: Identity(tenant=who)))  # type: ignore[misc]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://door") as client:
            await client.post("/v1/completions", json=asking("tiny", cache_salt="s"))
            salts.append(backend.submissions[-1][0].cache_salt)
    await fleet.close()
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4
    assert all(salt.endswith("s") for salt in salts)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "service.example.org", "::ffff:10.0.0.7"])
async def test_a_door_without_keys_that_others_reach_is_closed_and_says_the_way_out(host: str) -> None:
    app = build_app(Router(Fleet("router-0"), RouterConfig()), door=door_without_keys(host))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://door") as client:
        for path in Path:
            address = path.format(id="demo", file="page.js")
            for headers in ({}, key("whole")):
                answer = await client.request(path.method, address, headers=headers)
                assert answer.status_code == (503 if path is Path.HEALTH else 401), (path, answer.text)
                if path is not Path.HEALTH:
                    assert f"listens on {host}," in answer.json()["error"]["message"]
                    assert "127.0.0.1" in answer.text
                    assert "store: sqlite:///" in answer.text


def test_a_router_without_a_store_or_with_auth_none_has_such_a_door() -> None:
    for settings in (RouterSettings(), RouterSettings(auth="none")):
        assert door_for(settings, None, "127.0.0.1") is OPEN_DOOR
        assert door_for(settings, None, "0.0.0.0").closed is not None
    with pytest.raises(ValueError, match="needs a store"):
        door_for(RouterSettings(auth="keys"), None, "0.0.0.0")


@pytest.mark.parametrize("host", [None, "127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "localhost"])
def test_a_door_without_keys_is_open_where_only_this_machine_reaches_it(host: str | None) -> None:
    assert door_without_keys(host) is OPEN_DOOR
