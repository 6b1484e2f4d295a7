"""Who may fetch a stream anew, for how long, what becomes of the one that had it, and what it counts as."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from sqlalchemy import text

from serve_app.core import progress
from serve_app.core.cards import KeptCard
from serve_app.core.progress import Past
from serve_app.core.request import Kept
from serve_app.core.tenants import Identity, Meter, Tenant
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.http.settings import HttpSettings
from serve_app.router import resuming
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend, model_card, replica_card, settle
from tests.flow.bookkeeping import TENANTS, FakeAccounts, House, backend, house
from tests.flow.test_ledger import accounts, sums  # noqa: F401

ASKED = {"model": "tiny", "prompt": "a b c", "max_tokens": 12, "stream": True}
EVENTS = {"accept": "text/event-stream"}


ACME = Tenant(name="acme")


def app_of(tenant: Tenant = ACME, seconds: float = 60.0) -> tuple[httpx.AsyncClient, Fleet, FakeBackend]:
    """A router that knows everybody's key, and a replica."""
    fleet, replica = Fleet("router-0"), backend(0)
    fleet.put(replica.card, replica)
    door = Door(identify=lambda key: Identity(tenant=tenant, key_id=f"key {key}"))
    app = build_app(Router(fleet), HttpSettings(resume_s=seconds), door=door)
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://flow", headers={"x-api-key": "a"}
    )
    return client, fleet, replica


def shown(response: httpx.Response) -> str:
    """The text of a stream."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


def kept_of(replica: FakeBackend) -> Kept:
    kept = replica.submissions[-1][0].kept
    assert kept is not None
    return kept


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    made, fleet, _ = app_of()
    yield made
    await made.aclose()
    await fleet.close()


async def test_ids_come_to_who_reads_events_and_to_nobody_else(client: httpx.AsyncClient) -> None:
    plain = (await client.post("/v1/completions", json=ASKED)).text
    assert all(block.startswith("data: ") for block in plain.split("\n\n")[:-1])
    events = (await client.post("/v1/completions", json=ASKED, headers=EVENTS)).text
    assert all(block.startswith("id: ") for block in events.split("\n\n")[:-1])
    for path in ("/completion", "/v1/responses"):
        asked = {**ASKED, "input": "a"} if "responses" in path else {**ASKED, "n_predict": 2}
        response = await client.post(path, json=asked, headers=EVENTS)
        assert "id: " not in [line[:4] for line in response.text.splitlines()]


async def test_of_very_many_choices_no_event_has_an_id_and_all_can_be_fetched(client: httpx.AsyncClient) -> None:
    for num_prompts, has_ids in ((64, True), (65, False)):
        asked = {**ASKED, "prompt": ["a"] * num_prompts, "n": 2, "max_tokens": 1}
        first = await client.post("/v1/completions", json=asked, headers=EVENTS)
        assert ("id: " in [line[:4] for line in first.text.splitlines()]) == has_ids
        named = first.text.split('"id":"')[1].split('"')[0]
        assert sorted(shown(await client.get(f"/v1/completions/{named}")).split()) == sorted(shown(first).split())


async def test_a_stream_is_for_the_key_that_asked_for_it(client: httpx.AsyncClient) -> None:
    first = await client.post("/v1/completions", json=ASKED)
    named = first.text.split('"id":"')[1].split('"')[0]
    again = await client.get(f"/v1/completions/{named}")
    assert shown(again) == shown(first)
    other = await client.get(f"/v1/completions/{named}", headers={"x-api-key": "b"})
    unknown = await client.get("/v1/completions/cmpl-none", headers={"x-api-key": "b"})
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
    assert other.text.replace(named, "cmpl-none") == unknown.text
    assert "resume_s" in other.text
    assert (await client.head(f"/v1/completions/{named}")).status_code == 405


@pytest.mark.law("Exactly once")
@pytest.mark.parametrize("last_id", ["x", "99.{0}", "{1}", "{1}@", "{0}@", "{1}@{0}@{0}", "5" * 100_000, "٣"])
async def test_an_id_that_no_router_has_written_is_refused(client: httpx.AsyncClient, last_id: str) -> None:
    """Else a client could say that it was sent, and pays, more of a lost prompt than it was."""
    first = await client.post("/v1/completions", json=ASKED, headers=EVENTS)
    place, _, signature = first.text.split("\n")[0].removeprefix("id: ").partition("@")
    last_id = last_id.format(f"{place}@{signature}", place)
    named = first.text.split('"id":"')[1].split('"')[0]
    refused = await client.get(f"/v1/completions/{named}", headers={"last-event-id": last_id.encode()})  # type: ignore[dict-item]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_nothing_is_kept_where_the_operator_or_the_tenant_turned_it_off() -> None:
    for tenant, seconds in ((Tenant(name="acme", resumes=False), 60.0), (ACME, 0.0)):
        client, fleet, replica = app_of(tenant, seconds)
        await client.post("/v1/completions", json=ASKED, headers=EVENTS)
        assert replica.submissions[-1][0].kept is None
        await fleet.close()


async def test_what_is_kept_is_forgotten_in_time_and_gives_way_to_what_is_newer() -> None:
    client, fleet, replica = app_of(seconds=1000)
    now = 0.0
    replica.keeping._clock = lambda: now  # type: ignore[attr-defined]
    for _ in range(3):
        await client.post("/v1/completions", json=ASKED)
    card, named = replica.keeping.card, kept_of(replica).id
    assert card.num_streams == 3
    replica.keeping._max_bytes = card.num_bytes  # type: ignore[attr-defined]
    await client.post("/v1/completions", json=ASKED)
    assert replica.keeping.card == replace(card, num_forgotten=1)
    now = 999.0
    assert (await client.get(f"/v1/completions/{named}")).status_code == 200
    now = 1999.0
    assert (await client.get(f"/v1/completions/{named}")).status_code == 404
    assert replica.keeping.card.num_bytes == 0
    await fleet.close()


async def test_a_replica_that_is_gone_for_good_has_no_stream() -> None:
    client, fleet, replica = app_of()
    gone = backend(1)
    fleet.put(gone.card, gone)
    gone.die(ConnectionError("gone"))
    unknown = await client.get("/v1/completions/cmpl-none")
    assert unknown.status_code == 503, "it may come back"
    fleet.remove(gone.card.replica_id)
    assert (await client.get("/v1/completions/cmpl-none")).status_code == 404
    first = await client.post("/v1/completions", json=ASKED)
    fleet.remove(replica.card.replica_id)
    fleet.put(backend(2).card, backend(2))
    again = await client.get(f"/v1/completions/{kept_of(replica).id}")
    assert shown(again) == shown(first), "one that leaves has it still"
    await fleet.close()


async def test_who_does_not_know_all_replicas_yet_does_not_say_that_a_stream_is_gone() -> None:
    client, fleet, _ = app_of()
    fleet.expect(["tiny", "other"])
    unknown = await client.get("/v1/completions/cmpl-none")
    assert (unknown.status_code, unknown.headers["retry-after"]) == (503, "1")
    other = FakeBackend(replica_card("r1", model_card("other")))
    fleet.put(other.card, other)
    assert (await client.get("/v1/completions/cmpl-none")).status_code == 404
    await fleet.close()


async def test_a_replica_that_does_not_answer_holds_up_no_stream_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "ANSWER_S", 0.01)
    client, fleet, replica = app_of()
    first = await client.post("/v1/completions", json=ASKED)
    silent = backend(1)

    async def recall(response_id: str, owner: str, claim: str) -> tuple[Past, ...]:
        return await asyncio.Event().wait() and ()

    monkeypatch.setattr(silent, "recall", recall)
    fleet.put(silent.card, silent)
    async with asyncio.timeout(60):
        again = await client.get(f"/v1/completions/{kept_of(replica).id}")
        assert shown(again) == shown(first)
        assert (await client.get("/v1/completions/cmpl-none")).status_code == 503, "it may have that"
    await fleet.close()


async def test_what_a_prompt_takes_counts_beside_the_body_it_came_in() -> None:
    client, fleet, replica = app_of()
    words = "word " * 10_000
    for prompt in (words, [5] * 10_000):
        before = replica.keeping.card.num_bytes
        await client.post("/v1/completions", json={**ASKED, "prompt": prompt})
        kept = kept_of(replica)
        assert replica.keeping.card.num_bytes - before > len(kept.body) + len(words)
    await fleet.close()


async def test_a_stream_with_too_many_scores_is_kept_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_KEPT_SCORES", 2)
    client, fleet, replica = app_of()
    first = await client.post("/v1/completions", json={**ASKED, "logprobs": 0})
    assert len(shown(first).split()) == 12
    assert replica.keeping.card == KeptCard(num_forgotten=1)
    assert (await client.get(f"/v1/completions/{kept_of(replica).id}")).status_code == 404
    await fleet.close()


@pytest.mark.parametrize("dialect", ["union", "llama.cpp"])
async def test_whichever_choice_ended_last_each_is_told_once_wherever_it_was_cut(dialect: str) -> None:
    client, fleet, replica = app_of()
    replica.script = lambda request, sample: [f" {sample}{at}" for at in range(5 if sample == 0 else 3)]
    headers = {**EVENTS, "x-completions-dialect": dialect}
    asked = {**ASKED, "n": 2}
    whole = (await client.post("/v1/completions", json=asked, headers=headers)).text.split("\n\n")[:-1]
    named = whole[0].split('"id":"')[1].split('"')[0]
    for at, event in enumerate(whole):
        headers["last-event-id"] = event.split("\n")[0].removeprefix("id: ")
        rest = (await client.get(f"/v1/completions/{named}", headers=headers)).text.split("\n\n")[:-1]
        assert by_choice([*whole[: at + 1], *rest]) == by_choice(whole), (event, rest)
    await fleet.close()


def by_choice(events: list[str]) -> dict[int, tuple[str, int]]:
    """Of each choice the text, and how often it ends."""
    found: dict[int, tuple[str, int]] = {}
    for data in (each.split("data: ")[1] for each in events):
        for choice in json.loads(data)["choices"] if data != "[DONE]" else ():
            text, num_ends = found.get(choice["index"], ("", 0))
            found[choice["index"]] = text + choice["text"], num_ends + (choice["finish_reason"] is not None)
    return found


async def test_a_stream_of_an_alias_is_told_again_as_of_the_model_that_was_drawn() -> None:
    fleet = Fleet("router-0", aliases={"any": {"tiny": 1, "gaps": 1}})
    plain = backend(0)
    gaps = FakeBackend(replica_card("r1", replace(model_card("gaps"), fills_gaps=True)))
    for each in (plain, gaps):
        fleet.put(each.card, each)
    transport = httpx.ASGITransport(app=build_app(Router(fleet)))
    async with httpx.AsyncClient(transport=transport, base_url="http://flow") as client:
        endings = set()
        for _ in range(32):
            first = await client.post("/v1/completions", json={**ASKED, "model": "any", "suffix": " END"})
            named = first.text.split('"id":"')[1].split('"')[0]
            assert shown(await client.get(f"/v1/completions/{named}")) == shown(first)
            endings.add(shown(first).endswith(" END"))
    assert endings == {True, False}
    await fleet.close()


async def test_a_stream_of_which_nothing_was_told_goes_on_wherever_its_model_is() -> None:
    client, fleet, old = app_of()
    other = backend(1)
    old.is_stepped = True
    old.card, other.card = (
        replace(each.card, model=replace(each.card.model, numerics=numerics))
        for each, numerics in ((old, "old"), (other, "new"))
    )
    fleet.put(old.card, old)
    lost = asyncio.create_task(client.post("/v1/completions", json=ASKED))
    while not old.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    fleet.put(other.card, other)
    fleet.remove(old.card.replica_id)
    again = await client.get(f"/v1/completions/{kept_of(old).id}")
    assert (again.status_code, len(other.submissions)) == (200, 1), again.text
    await fleet.close()


async def begun(first: House, stepped: FakeBackend, num_steps: int) -> Kept:
    """A stream that has come so far."""
    first.ask("acme", stream=True)
    while not stepped.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(num_steps):
        stepped.step()
        await settle(100)
    return kept_of(stepped)


async def stepped_to_the_end(stepped: FakeBackend, task: asyncio.Task[httpx.Response]) -> httpx.Response:
    while not task.done():
        stepped.step()
        await asyncio.sleep(0)
    return task.result()


@pytest.mark.law("Exactly once")
@pytest.mark.parametrize("end", ["left", "taken", "killed", "late"])
async def test_a_stream_that_is_fetched_elsewhere_is_one_row_and_counts_once(
    accounts: FakeAccounts,  # noqa: F811
    end: str,
) -> None:
    stepped = backend(0, is_stepped=True)
    first, second = house(accounts, [stepped], "router-0"), house(accounts, [stepped], "router-1")
    kept = await begun(first, stepped, 5)
    if end != "taken":
        first.tasks[0].cancel()
        await asyncio.gather(*first.tasks, return_exceptions=True)
    if end == "left":
        await first.accounting.ledger_writer.flush()
    get = second.client.get(f"/v1/completions/{kept.id}", headers={"x-api-key": "acme"})
    answer = await stepped_to_the_end(stepped, asyncio.create_task(get))
    assert (answer.status_code, shown(answer)) == (200, "".join(f" p0s0w{at}" for at in range(12)))
    await second.accounting.ledger_writer.flush()
    if end == "taken":
        told = await first.tasks[0]
        assert isinstance(told, httpx.Response)
        assert told.text.count('"stream_resumed"') == 1
    if end != "killed":
        await first.accounting.ledger_writer.flush()
    with accounts.store.engine.connect() as connection:
        rows = connection.execute(text("SELECT status, prompt_tokens, completion_tokens, choices FROM ledger")).all()
    assert [tuple(row) for row in rows] == [(200, 3, 12, 1)]
    found = sums(accounts, tenant="acme")
    assert (found["requests"], found["prompt_tokens"], found["completion_tokens"]) == (1, 3, 12)
    assert found["cost"] == 3 * 1000 + 12 * 2000
    kept_of_limits = [each.accounting.quotas._account(TENANTS["acme"]).statement() for each in (first, second)]
    assert sum(each.used[Meter.TOKENS] for each in kept_of_limits) == 15
    await first.kill()
    await second.kill()
