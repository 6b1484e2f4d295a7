"""An alias with weights: who answers, who is told so, and who answers instead of a target that is gone."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from serve_app.catalog.aliases import in_order
from serve_app.core.tenants import LOCAL, Identity, Rights, Tenant
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card
from tests.flow.bookkeeping import FakeAccounts, backend, house
from tests.flow.test_ledger import accounts, sums

OLD, NEW = "a1" * 16, "b2" * 16
STABLE, CANARY = f"tiny:sql@{OLD[:8]}", f"tiny:sql@{NEW[:8]}"
SERVED = {STABLE: f"tiny:sql@{OLD}", CANARY: f"tiny:sql@{NEW}"}
USERS = [f"user-{number}" for number in range(60)]
BODY = {"model": "prod", "prompt": "Hello", "max_tokens": 2}

__all__ = ["accounts"]


def split(**weights: float) -> dict[str, object]:
    return {"prod": {STABLE: weights.get("stable", 1.0), CANARY: weights.get("canary", 1.0)}}


def replica(number: int, *versions: str) -> FakeBackend:
    """One that has these versions of the adapter; its name means the first."""
    first, *others = (adapter_card("sql", version) for version in versions)
    return FakeBackend(replica_card(f"r{number}", replace(model_card("tiny", first), staged=tuple(others))))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet("router-0", aliases=split())
    for number in range(2):
        made = replica(number, OLD, NEW)
        fleet.put(made.card, made)
    yield fleet
    await fleet.close()


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(build_app(Router(fleet))), base_url="http://test"
    ) as made:
        yield made


async def served(client: httpx.AsyncClient, path: str = "/v1/completions", **body: object) -> str:
    answer = await client.post(path, json=BODY | body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-served-model"]


def drawn(user: str, fleet: Fleet, alias: str = "prod") -> str:
    return SERVED[in_order(fleet.aliases[alias].weights, alias, LOCAL.tenant.own, "user", user)[0]]


async def test_the_same_user_gets_the_same_version_on_every_route_and_router(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    found = {user: await served(client, user=user) for user in USERS}
    assert found == {user: drawn(user, fleet) for user in USERS}
    assert set(found.values()) == set(SERVED.values())
    chat = {"prompt": None, "messages": [{"role": "user", "content": "Hello"}]}
    for user in USERS[:8]:
        assert await served(client, user=user, stream=True) == found[user]
        assert await served(client, user=user, n=3) == found[user]
        assert await served(client, user=user, prompt=["a", "b", "c"]) == found[user]
        body = {"model": "prod", "user": user}
        for path, more in (
            ("/v1/chat/completions", {"messages": chat["messages"]}),
            ("/v1/responses", {"input": "Hello"}),
            ("/v1/embeddings", {"input": "Hello"}),
            ("/v1/score", {"text_1": "Hello", "text_2": "Goodbye"}),
            ("/completion", {"prompt": "Hello", "n_predict": 2}),
        ):
            answer = await client.post(path, json=body | more)
            assert (answer.status_code, answer.headers["x-served-model"]) == (200, found[user]), answer.text


async def test_without_a_user_each_request_is_drawn_for_by_itself(client: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "one"}
    same = {
        (await client.post("/v1/completions", json=BODY, headers=headers)).headers["x-served-model"] for _ in "abcd"
    }
    assert len(same) == 1
    assert {await served(client) for _ in range(64)} == set(SERVED.values()), "all alike is 1 of 2**63"
    assert {await served(client, user="") for _ in range(64)} == set(SERVED.values())


async def test_changed_weights_move_no_one_else(client: httpx.AsyncClient, fleet: Fleet) -> None:
    before = {user: await served(client, user=user) for user in USERS}
    fleet.rename(split(canary=2.0))
    after = {user: await served(client, user=user) for user in USERS}
    moves = Counter((before[user], after[user]) for user in USERS if before[user] != after[user])
    assert set(moves) == {(SERVED[STABLE], SERVED[CANARY])}
    fleet.rename(split(canary=0.0))
    assert {await served(client, user=user) for user in USERS} == {SERVED[STABLE]}


async def test_model_in_the_body_is_what_was_sent_and_the_log_has_who_answered(
    client: httpx.AsyncClient, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "serve_app"):
        answer = await client.post("/v1/completions", json=BODY | {"user": "ann"})
    assert answer.json()["model"] == "prod"
    lines = [json.loads(each.message) for each in caplog.records if each.name == "serve_app.http.completions"]
    assert [(each["model"], each["served"]) for each in lines] == [("tiny:sql", drawn("ann", fleet))]
    assert 'model="tiny:sql"' in (await client.get("/metrics")).text


async def test_the_openai_client_is_told_in_a_header(fleet: Fleet) -> None:
    transport = httpx.AsyncClient(transport=httpx.ASGITransport(build_app(Router(fleet))), base_url="http://test")
    async with openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=transport) as asked:
        raw = await asked.completions.with_raw_response.create(model="prod", prompt="Hello", max_tokens=2, user="bob")
        assert raw.headers["x-served-model"] == drawn("bob", fleet)
        again = await asked.completions.create(model=raw.headers["x-served-model"], prompt="Hello", max_tokens=2)
        assert again.model == raw.headers["x-served-model"], "the header is an address"


async def test_a_list_is_answered_by_one_target_of_each_alias(client: httpx.AsyncClient, fleet: Fleet) -> None:
    fleet.rename(split() | {"dev": {STABLE: 1.0, CANARY: 1.0}})
    for user in USERS[:16]:
        found = await served(client, user=user, model=["prod", "tiny", "dev"])
        assert found == ", ".join(dict.fromkeys([drawn(user, fleet), "tiny", drawn(user, fleet, "dev")]))


async def test_another_target_answers_for_one_that_is_gone_and_the_first_again_when_it_is_back(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    before = {user: await served(client, user=user) for user in USERS}
    for number in range(2):
        fleet.put(*card_and_backend(replica(number, OLD)))
    assert {await served(client, user=user) for user in USERS} == {SERVED[STABLE]}
    for number in range(2):
        fleet.put(*card_and_backend(replica(number, NEW, OLD)))
    assert {user: await served(client, user=user) for user in USERS} == before


async def test_a_base_that_is_down_or_loading_is_answered_for_by_another_one(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    fleet.expect(["tiny", "big", "bad"], ["bad"])
    fleet.rename({"prod": {"big": 50, "bad": 40, "tiny": 10}, "gone": {"bad": 1, "big": 1}})
    assert {await served(client, user=user) for user in USERS} == {"tiny"}
    answer = await client.post("/v1/completions", json=BODY | {"model": "gone"})
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


async def test_the_list_of_models_has_the_targets_and_questions_are_the_heaviests(
    client: httpx.AsyncClient, fleet: Fleet
) -> None:
    fleet.rename({"prod": {CANARY: 5, STABLE: 95, "tiny:nobody": 1}})
    entry = (await client.get("/v1/models/prod")).json()
    assert (entry["parent"], entry["version"]) == ("tiny:sql", OLD)
    assert entry["weights"] == {"tiny:sql": 95.0, SERVED[CANARY]: 5.0}
    assert entry in (await client.get("/v1/models")).json()["data"]
    assert (await client.post("/tokenize", json={"model": "prod", "prompt": "a b"})).status_code == 200


async def test_a_tenant_gets_the_targets_that_it_may_use() -> None:
    fleet = Fleet("router-0", aliases={"prod": {"tiny:sql": 99, "tiny:law": 1}, "base": {"tiny": 1, "other": 1}})
    made = FakeBackend(replica_card("r0", model_card("tiny", adapter_card("sql"), adapter_card("law"))))
    fleet.put(made.card, made)
    identity = Identity(tenant=Tenant(name="acme", rights=Rights(("tiny:law",))))
    app = build_app(Router(fleet), door=Door(identify=lambda _: identity))
    headers = {"x-api-key": "sa-1"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers) as client:
        assert {await served(client, user=user) for user in USERS[:8]} == {"tiny:law@v1"}
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["tiny:law", "prod"]
        answer = await client.post("/v1/completions", json=BODY | {"model": "base"})
        assert (answer.status_code, "other" in answer.text) == (404, False)
    await fleet.close()


async def test_the_ledger_has_the_version_that_answered(accounts: FakeAccounts, tmp_path: Path) -> None:
    one = house(accounts, [backend(0)])
    one.fleet.rename({"prod": {"tiny:pirate": 1, "tiny:json": 0}})
    one.ask("acme", model="prod", n=2)
    answer = await one.tasks[0]
    assert isinstance(answer, httpx.Response)
    assert answer.status_code == 200, answer.text
    await one.accounting.ledger_writer.flush()
    assert sums(accounts, key_id="key of acme", adapter="pirate")["choices"] == 2
    await one.kill()


def card_and_backend(made: FakeBackend):  # type: ignore[no-untyped-def]
    return made.card, made
