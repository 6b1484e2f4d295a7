"""What the ledger knows of requests that run, are given up, and of routers and replicas that die at any point."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine

from serve_app.core.errors import Overloaded
from serve_app.core.ledger import UNATTRIBUTED, Spent, UsageQuestion
from serve_app.tenants.ledger import LedgerStore
from serve_app.tenants.lending import Lending
from tests.agreement import SPENT, disagreements
from tests.fakes import settle
from tests.flow.bookkeeping import TENANTS, FakeAccounts, House, backend, flushed, house
from tests.flow.play import Client, Play

TURNS_TO_BE_TAKEN = 3
"""Until a router knows that a replica took a request, which then has a row. Tokens may come before."""


@pytest.fixture
def accounts(tmp_path: Path) -> FakeAccounts:
    store = LedgerStore(create_engine(f"sqlite:///{tmp_path / 'ledger.db'}"))
    return FakeAccounts(store, Lending(lambda name: TENANTS[name].limits, clock=lambda: 0.0, wall=lambda: 0.0))


@pytest.fixture
async def one(accounts: FakeAccounts) -> AsyncIterator[House]:
    made = house(accounts, [backend(0)])
    yield made
    await made.kill()


def sums(accounts: FakeAccounts, **by: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in accounts.store.usage(UsageQuestion(by=("tenant", "key_id", "model", "adapter", "day"))):
        if all(line.by[name] == value for name, value in by.items()):
            found.update(line.sums)
    return found


async def test_a_request_is_one_row_with_what_it_came_to(one: House, accounts: FakeAccounts) -> None:
    one.ask("acme", model="tiny:pirate", n=2)
    response = await one.tasks[0]
    assert isinstance(response, httpx.Response)
    usage = response.json()["usage"]
    await one.accounting.ledger_writer.flush()
    found = sums(accounts, key_id="key of acme", adapter="pirate")
    assert (found["requests"], found["choices"]) == (1, 2)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert found["cost"] == 1000 * usage["prompt_tokens"] + 2000 * usage["completion_tokens"]
    assert sums(accounts, key_id=UNATTRIBUTED)["completion_tokens"] == 0


async def test_a_repeat_under_an_idempotency_key_is_one_row_and_uses_up_no_limit(
    one: House, accounts: FakeAccounts
) -> None:
    asked = {"model": "tiny", "prompt": "a b c", "max_tokens": 12}
    headers = {"x-api-key": "acme", "idempotency-key": "once"}
    first, again = [await one.client.post("/v1/completions", json=asked, headers=headers) for _ in range(2)]
    assert (first.status_code, again.content) == (200, first.content)
    plain = await one.client.post("/v1/completions", json=asked, headers={"x-api-key": "acme"})
    left = [int(each.headers["x-ratelimit-remaining-requests"]) for each in (first, plain)]
    assert left == [99, 98]
    await one.accounting.ledger_writer.flush()
    found = sums(accounts, key_id="key of acme")
    usages = [each.json()["usage"]["completion_tokens"] for each in (first, plain)]
    assert (found["requests"], found["completion_tokens"]) == (2, sum(usages))
    assert sums(accounts, key_id=UNATTRIBUTED)["completion_tokens"] == 0


async def test_answers_tell_how_the_limits_stand(one: House) -> None:
    one.ask("acme")
    one.ask("beta")
    mine, free = await asyncio.gather(*one.tasks)
    assert isinstance(mine, httpx.Response)
    assert isinstance(free, httpx.Response)
    assert mine.headers["x-ratelimit-limit-requests"] == "100"
    assert mine.headers["x-ratelimit-remaining-requests"] == "99"
    reserved = len(b"a b c") + 8 + 12
    assert mine.headers["x-ratelimit-remaining-tokens"] == str(100_000 - reserved)
    assert mine.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a b"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/explain", {"model": "tiny", "prompt": "a b", "max_tokens": 5}),
    ],
)
async def test_requests_that_compute_no_tokens_count_too_and_have_no_row(
    one: House, accounts: FakeAccounts, path: str, body: dict[str, object]
) -> None:
    headers = {"x-api-key": "acme"}
    refused = await one.client.post(path, json={"tokens": "none", "prompt": 0}, headers=headers)
    assert refused.status_code == 400
    answers = [await one.client.post(path, json=body, headers=headers) for _ in range(101)]
    assert [each.status_code for each in answers] == [200] * 100 + [429], "what was refused cost nothing"
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "99"
    assert answers[-1].json()["error"]["limit"] == "requests_per_minute"
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert answers[-1].headers["x-ratelimit-remaining-requests"] == "0"
    assert (await one.client.post(path, json=body, headers={"x-api-key": "beta"})).status_code == 200
    await one.accounting.ledger_writer.flush()
    assert sums(accounts)["requests"] == 0


async def test_over_a_limit_clients_are_refused_in_their_dialect_and_told_when_to_come(accounts: FakeAccounts) -> None:
    slow = house(accounts, [backend(0, is_stepped=True)])
    for _ in range(9):
        slow.ask("acme")
    done, _ = await asyncio.wait(slow.tasks, return_when=asyncio.FIRST_COMPLETED)
    [refused] = [await task for task in done]
    assert isinstance(refused, httpx.Response)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, 429)
    assert refused.json()["error"]["error_code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-ratelimit-remaining-requests"] != ""
    await slow.kill()


@pytest.mark.parametrize(("is_stream", "completion"), [(True, 2), (False, 12)])
async def test_a_client_that_leaves_pays_what_was_computed_and_gets_back_what_was_reserved(
    accounts: FakeAccounts, is_stream: bool, completion: int
) -> None:
    """Of what is answered whole a replica tells now and then: who leaves in between has used what may have been
    computed until then, which at this pace is all.
    """
    stepped = backend(0, is_stepped=True)
    slow = house(accounts, [stepped])
    slow.ask("acme", stream=is_stream)
    while not stepped.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    stepped.step()
    stepped.step()
    await settle(100)
    slow.tasks[0].cancel()
    await asyncio.gather(*slow.tasks, return_exceptions=True)
    await slow.accounting.ledger_writer.flush()
    assert sums(accounts, tenant="acme")["completion_tokens"] == stepped.spent["acme"].completion_tokens
    await slow.accounting.quotas.renew()
    rates = slow.accounting.quotas.rates(TENANTS["acme"])
    assert [rate.remaining for rate in rates.values()] == [99, 100_000 - 3 - completion]
    assert accounts.lending.free("acme")
    await slow.kill()


async def test_a_client_that_leaves_before_its_first_token_has_used_a_request_and_what_its_prompts_may_come_to(
    accounts: FakeAccounts,
) -> None:
    stepped = backend(0, is_stepped=True)
    slow = house(accounts, [stepped])
    slow.ask("acme", prompt=["a b c", "d" * 100])
    while not stepped.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await settle(100)
    slow.tasks[0].cancel()
    await asyncio.gather(*slow.tasks, return_exceptions=True)
    await slow.accounting.ledger_writer.flush()
    assert sums(accounts, tenant="acme")["prompt_tokens"] == 0, "no row tells of what nobody knows"
    await slow.accounting.quotas.renew()
    rates = slow.accounting.quotas.rates(TENANTS["acme"])
    assert [rate.remaining for rate in rates.values()] == [99, 100_000 - (5 + 8) - (100 + 8)]
    await slow.kill()


async def test_who_leaves_before_a_replica_has_said_that_it_takes_it_has_used_a_request(accounts: FakeAccounts) -> None:
    """It may be computed by then: whoever hung up so early again and again would have the engine for nothing."""
    num_given = 0
    for num_turns in range(12):
        stepped = backend(0, is_stepped=True)
        slow = house(accounts, [stepped], f"router-{num_turns}")
        slow.ask("beta")
        for _ in range(num_turns):
            await asyncio.sleep(0)
        slow.tasks[0].cancel()
        await asyncio.gather(*slow.tasks, return_exceptions=True)
        num_given += bool(stepped.submissions)
        await slow.accounting.ledger_writer.flush()
        assert sums(accounts, tenant="beta")["requests"] == num_given
        await slow.kill()
    assert 0 < num_given < 12


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_what_the_service_does_not_get_done_uses_up_no_limit(accounts: FakeAccounts, is_accepted: bool) -> None:
    stepped = backend(0, is_stepped=True)
    slow = house(accounts, [stepped])
    if not is_accepted:
        stepped.refusal = Overloaded("full", None, {"retry_after_s": 2})
    slow.ask("acme")
    while is_accepted and not stepped.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await settle(100)
    stepped.die()
    [answer] = await asyncio.gather(*slow.tasks)
    assert isinstance(answer, httpx.Response)
    assert answer.status_code >= 500
    await slow.accounting.quotas.renew()
    assert [rate.remaining for rate in slow.accounting.quotas.rates(TENANTS["acme"]).values()] == [100, 100_000]
    await slow.kill()


async def check(play: Play) -> None:
    """That the ledger is exact: to the token, of every request."""
    kept = play.kept
    shown = {
        (replica.card.replica_id, tenant): {name: getattr(spent, name) for name in SPENT}
        for replica in play.replicas
        for tenant, spent in replica.spent.items()
    }
    assert disagreements(kept, [play.asked(client) for client in play.clients], shown) == []
    assert kept.counted.keys() == shown.keys()
    assert kept.rows.keys() <= {client.name for client in play.clients}
    for client in play.clients:
        check_one(play, client, kept.row(client.name))
    for each in play.houses:
        await each.kill()


def check_one(play: Play, client: Client, row: Counter[str] | None) -> None:
    """By what replicas computed for it, which neither its client nor its router says."""
    attempts = play.spent_on(client)
    answered = added([spent for _, spent in attempts])
    has_lost_its_router = client.house is play.killed and not client.is_brought
    if client.usage is not None:
        assert has_lost_its_router or row is not None
        assert row is None or (row["prompt_tokens"], row["completion_tokens"]) == client.usage
    if row is not None:
        assert all(row[name] <= amount for name, amount in answered.items())
        if client.usage is not None and play.dead not in [replica for replica, _ in attempts]:
            assert {name: row[name] for name in SPENT} == answered
    elif client.has_left:
        assert has_lost_its_router or answered["completion_tokens"] <= TURNS_TO_BE_TAKEN * client.n
    if not (client.has_left or client.house is play.killed or play.dead in [replica for replica, _ in attempts]):
        assert client.usage is not None or client.task.result().status_code == 429


def added(spent: Sequence[Spent]) -> dict[str, int]:
    return {name: sum(getattr(each, name) for each in spent) for name in SPENT}


@pytest.mark.law("Exactly once")
@pytest.mark.parametrize("seed", range(30))
async def test_whatever_dies_and_whenever_every_token_is_in_a_row_or_unattributed(
    accounts: FakeAccounts, seed: int
) -> None:
    """At a random point one of the four dies, and calls of accounts get lost."""
    accounts.drops = random.Random(seed)
    play = Play(accounts, random.Random(seed))
    await play.run(dies_at=play.drawn.randrange(40), share_leaving=0.05)
    await check(play)
    for tenant in TENANTS:
        found = sums(accounts, tenant=tenant)
        assert found["cost"] == 1000 * found["prompt_tokens"] + 2000 * found["completion_tokens"]
    assert sums(accounts)["requests"] == accounts.num_recorded


@pytest.mark.law("Exactly once")
@pytest.mark.parametrize("seed", range(10))
async def test_where_nothing_dies_and_nobody_leaves_every_token_is_in_a_row(accounts: FakeAccounts, seed: int) -> None:
    """Though calls of accounts get lost."""
    accounts.drops = random.Random(seed)
    play = Play(accounts, random.Random(seed))
    await play.run(dies_at=None, share_leaving=0.0)
    await check(play)
    assert sums(accounts)["requests"] == sum(client.usage is not None for client in play.clients) > 20
    assert {name: sums(accounts, key_id=UNATTRIBUTED)[name] for name in SPENT} == dict.fromkeys(SPENT, 0)


async def test_the_ledger_being_away_holds_up_no_request_and_loses_no_row(one: House, accounts: FakeAccounts) -> None:
    accounts.drops = random.Random(0)
    for _ in range(20):
        one.ask("beta")
    assert {json.loads(each.text)["usage"]["completion_tokens"] for each in await asyncio.gather(*one.tasks)} == {12}  # type: ignore[attr-defined]
    assert one.accounting.ledger_writer.num_waiting == 20
    await flushed(one, is_sure=True)
    assert (one.accounting.ledger_writer.num_waiting, sums(accounts)["requests"]) == (0, 20)
