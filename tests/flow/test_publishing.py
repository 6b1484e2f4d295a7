"""Adapters published over HTTP: vLLM's two routes, those of administrators, keys and what they may do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import jsonschema
import pytest

from serve_app.api.paths import AdminPath
from serve_app.core.tenants import Scope
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.router.publishing import Publishing
from serve_app.router.rollouts import Rollouts
from serve_app.router.router import Router
from serve_app.tenants.store import Author
from tests.flow.house import House, bearing

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def adapter_at(root: Path, name: str, weights: bytes = b"v1") -> str:
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    async with made.kept_open():
        yield made
    made.store.close()


@pytest.fixture
def publishing(house: House, tmp_path: Path) -> Publishing:
    return Publishing(house.fleet, roots=[str(tmp_path)])


@pytest.fixture
async def opened(house: House, publishing: Publishing) -> AsyncIterator[httpx.AsyncClient]:
    """A service that asks nobody for a key."""
    app = build_app(Router(house.fleet), publishing=publishing)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://open") as client:
        yield client


@pytest.fixture
async def guarded(house: House, publishing: Publishing) -> AsyncIterator[httpx.AsyncClient]:
    """A service that asks for keys, as an administrator sees it."""
    door = Door(identify=lambda key: house.store.directory(b"p" * 32).identify(key, 1.0), administer=house.administer)
    router = Router(house.fleet, rollouts=Rollouts(publishing, house.fleet))
    app = build_app(router, door=door, publishing=publishing)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://door", headers=bearing(house.admin)
    ) as client:
        yield client


def key_for(house: House, tenant: str, *scopes: Scope, **declared: object) -> dict[str, str]:
    by = Author(name="test", at=0.0)
    house.admin_service.answer("add_tenant", {"name": tenant, **declared}, by)
    made = house.admin_service.answer("create_key", {"tenant": tenant, "scopes": list(scopes)}, by)
    return bearing(str(made["key"]))


async def complete(client: httpx.AsyncClient, model: str, **headers: str) -> httpx.Response:
    body = {"model": model, "prompt": "a", "max_tokens": 1}
    return await client.post("/v1/completions", json=body, headers=headers)


async def test_vllms_routes_load_and_unload(opened: httpx.AsyncClient, tmp_path: Path) -> None:
    body = {"lora_name": "tiny:law", "lora_path": adapter_at(tmp_path, "law")}
    assert (await complete(opened, "tiny:law")).status_code == 404
    loaded = await opened.post(LOAD, json=body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'tiny:law' added successfully.")
    assert (await complete(opened, "tiny:law")).status_code == 200
    twice = await opened.post(LOAD, json=body)
    assert twice.status_code == 400
    assert "has already been loaded" in twice.json()["error"]["message"]
    assert (await opened.post(LOAD, json={**body, "load_inplace": True})).status_code == 200
    unloaded = await opened.post(UNLOAD, json={"lora_name": "law"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'law' removed successfully.")
    gone = await opened.post(UNLOAD, json={"lora_name": "tiny:law"})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_name")
    assert (await complete(opened, "tiny:law")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (LOAD, {}, "lora_name"),
        (LOAD, {"lora_name": "tiny:law"}, "lora_path"),
        (LOAD, {"lora_name": 5, "lora_path": "x"}, "lora_name"),
        (LOAD, {"lora_name": "tiny:law", "lora_path": "x", "load_inplace": "yes"}, "load_inplace"),
        (LOAD, {"lora_name": "tiny:law", "lora_path": "x", "lora_int_id": 3}, "lora_int_id"),
        (UNLOAD, {}, "lora_name"),
        (AdminPath.ADAPTERS, {"lora_path": "x"}, "lora_name"),
        (AdminPath.ROLLBACK, {"lora_name": None}, "lora_name"),
    ],
)
async def test_a_body_that_says_something_else_is_refused_by_name(
    opened: httpx.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    refused = await opened.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_versions_are_listed_replaced_rolled_back_and_withdrawn(
    guarded: httpx.AsyncClient, tmp_path: Path
) -> None:
    first = (
        await guarded.post("/admin/adapters", json={"lora_name": "tiny:law", "lora_path": adapter_at(tmp_path, "law")})
    ).json()
    changed = {"lora_name": "tiny:law", "lora_path": adapter_at(tmp_path, "law-2", b"v2"), "load_inplace": True}
    second = (await guarded.post("/admin/adapters", json=changed)).json()
    assert second["previous"] == {"version": first["version"], "path": first["path"]}
    assert (second["by"], second["replicas"], second["ready_replicas"]) == ("operator", 1, 1)
    listed = (await guarded.get("/admin/adapters")).json()
    assert listed["revision"] == 2
    assert {each["id"]: each["version"] for each in listed["data"]} == {
        "tiny:law": second["version"],
        "tiny:sql": "v1",
    }
    back = (await guarded.post("/admin/adapters/rollback", json={"lora_name": "law"})).json()
    assert (back["version"], back["previous"]["version"]) == (first["version"], second["version"])
    gone = await guarded.delete("/admin/adapters", params={"lora_name": "tiny:law"})
    assert gone.json() == {"withdrawn": "tiny:law"}
    assert [each["id"] for each in (await guarded.get("/admin/adapters")).json()["data"]] == ["tiny:sql"]


async def test_a_canary_is_published_by_a_percentage_listed_and_rolled_back(
    house: House, guarded: httpx.AsyncClient, tmp_path: Path
) -> None:
    sent = {"lora_name": "tiny:law", "lora_path": adapter_at(tmp_path, "law")}
    first = (await guarded.post("/admin/adapters", json=sent)).json()
    assert first["canary"] is None
    tried = {**sent, "lora_path": adapter_at(tmp_path, "law-2", b"v2")}
    for canary in ("0%", "100%", "5", "-5%", "1e1%", "five%", 5):
        refused = await guarded.post("/admin/adapters", json={**tried, "canary": canary})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "canary")
    second = (await guarded.post("/admin/adapters", json={**tried, "canary": "2.5%"})).json()
    assert (second["version"], second["canary"]["share"]) == (first["version"], 0.025)
    assert second["canary"]["counted"] == {"requests": 0, "errors": 0, "first_token_s": None, "token_s": None}
    back = (await guarded.post("/admin/adapters/rollback", json={"lora_name": "law"})).json()
    assert (back["version"], back["canary"]) == (first["version"], None)
    writer = key_for(house, "acme", Scope.ADAPTERS_WRITE, publishes=["tiny:*"])
    loaded = await guarded.post(LOAD, json={**tried, "canary": "5%"}, headers=writer)
    assert loaded.status_code == 200


async def test_an_adapter_of_the_models_list_says_its_version(opened: httpx.AsyncClient, tmp_path: Path) -> None:
    await opened.post(LOAD, json={"lora_name": "tiny:law", "lora_path": adapter_at(tmp_path, "law")})
    versions = {each["id"]: each["version"] for each in (await opened.get("/v1/models")).json()["data"]}
    listed = {each["id"]: each["version"] for each in (await opened.get("/admin/adapters")).json()["data"]}
    assert versions == {"tiny": None, **listed}


async def test_a_key_publishes_only_with_the_scope_and_under_its_tenants_names(
    house: House, guarded: httpx.AsyncClient, tmp_path: Path
) -> None:
    folder = adapter_at(tmp_path, "law")
    writer = key_for(house, "acme", Scope.ADAPTERS_WRITE, publishes=["tiny:acme-*"])
    reader = key_for(house, "beta", Scope.INFER, Scope.METRICS, publishes=["tiny:*"])
    nobody = key_for(house, "gamma", Scope.ADAPTERS_WRITE)
    body = {"lora_name": "tiny:acme-law", "lora_path": folder}
    for headers, name, status in (
        (reader, "tiny:acme-law", 403),
        (nobody, "tiny:acme-law", 403),
        (writer, "tiny:law", 403),
        (writer, "tiny:acme-law", 200),
    ):
        answered = await guarded.post(LOAD, json={**body, "lora_name": name}, headers=headers)
        assert answered.status_code == status, (name, answered.text)
    for path in (UNLOAD, AdminPath.ROLLBACK, AdminPath.ADAPTERS):
        assert (await guarded.post(path, json={"lora_name": "tiny:sql"}, headers=writer)).status_code == 403
    assert (await guarded.get("/admin/adapters", headers=writer)).status_code == 403
    seen = (await guarded.get("/admin/adapters")).json()["data"]
    assert [(each["id"], each["by"]) for each in seen] == [("tiny:acme-law", "acme"), ("tiny:sql", None)]
    assert (await guarded.post(UNLOAD, json={"lora_name": "tiny:acme-law"}, headers=writer)).status_code == 200


async def test_a_path_that_is_not_allowed_tells_nothing_of_what_is_there(
    opened: httpx.AsyncClient, tmp_path: Path
) -> None:
    answers = []
    for path in ("/etc/passwd", "/etc", "/nowhere", f"{tmp_path}/../x", f"{tmp_path}/none"):
        refused = await opened.post(LOAD, json={"lora_name": "tiny:law", "lora_path": path})
        answers.append((refused.status_code, refused.json()["error"]["message"].partition("; found")[0]))
    assert len(set(answers)) == 1
    assert answers[0][0] == 403


async def test_what_is_answered_is_as_it_is_described(opened: httpx.AsyncClient, tmp_path: Path) -> None:
    document = (await opened.get("/openapi.json")).json()
    sent = {"lora_name": "tiny:law", "lora_path": adapter_at(tmp_path, "law")}
    asked = [
        ("post", "/admin/adapters", {"json": sent}),
        ("get", "/admin/adapters", {}),
        ("delete", "/admin/adapters", {"params": {"lora_name": "tiny:law"}}),
        ("delete", "/admin/adapters", {"params": {"lora_name": "tiny:law"}}),
        ("delete", "/admin/adapters", {}),
        ("post", "/admin/adapters/rollback", {"json": {"lora_name": "tiny:law"}}),
        ("post", LOAD, {"json": {**sent, "lora_path": "/"}}),
    ]
    statuses = []
    for method, path, arguments in asked:
        answered = await opened.request(method, path, **arguments)
        statuses.append(answered.status_code)
        schema = document["paths"][path][method]["responses"][str(answered.status_code)]["content"]
        described = {**schema["application/json"]["schema"], "components": document["components"]}
        jsonschema.validate(answered.json(), described)
    assert statuses == [200, 200, 200, 404, 400, 404, 403]


async def test_other_methods_are_named(opened: httpx.AsyncClient) -> None:
    refused = await opened.put("/admin/adapters", json={})
    assert (refused.status_code, set(refused.headers["allow"].replace(" ", "").split(","))) == (
        405,
        {"GET", "HEAD", "POST", "DELETE"},
    )
