"""What the ledger knows of requests that run, are given up, and of routers and replicas that die at any point."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine

from serve_app.core.errors import Overloaded
from serve_app.core.ledger import UNATTRIBUTED, Counted, Row, Spent, UsageLine, UsageQuestion
from serve_app.core.prices import Price, Prices
from serve_app.core.quotas import Lease, Statement
from serve_app.core.tenants import Identity, Limits, Tenant
from serve_app.http.app import build_app
from serve_app.http.guard import Door
from serve_app.router.books import Books
from serve_app.router.fleet import Fleet
from serve_app.router.quotas import Quotas
from serve_app.router.replays import Replays, ReplaySettings
from serve_app.router.router import Router
from serve_app.router.scribe import Scribe
from serve_app.tenants.ledger import LedgerStore
from serve_app.tenants.lending import Lending
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card

LIMITS = Limits(requests_per_minute=100, tokens_per_minute=100_000, max_in_flight=8)
TENANTS = {name: Tenant(name=name, limits=LIMITS if name == "acme" else Limits()) for name in ("acme", "beta")}
SPENT = ("prompt_tokens", "cached_tokens", "completion_tokens", "engine_ns")


@dataclass(slots=True)
class FakeAccounts:
    """Accounts in the process. drops: answers get lost after the rows were kept"""

    store: LedgerStore
    lending: Lending
    drops: random.Random | None = None
    num_recorded: int = 0
    prices: Prices | None = None

    def charge_by(self, prices: Prices) -> None:
        self.prices = prices

    async def renew(self, router_id: str, statements: Sequence[Statement]) -> Sequence[Lease]:
        return [self.lending.renew(router_id, each) for each in statements]

    async def record(self, rows: Sequence[Row], counted: Sequence[Counted]) -> None:
        self.num_recorded += self.store.record(rows, counted, 0.0, prices=self.prices)
        if self.drops is not None and self.drops.random() < 0.3:
            raise ConnectionError("the answer was lost")

    async def usage(self, question: UsageQuestion) -> Sequence[UsageLine]:
        return self.store.usage(question)


@dataclass(slots=True)
class House:
    """One router, its clients and its books."""

    fleet: Fleet
    books: Books
    client: httpx.AsyncClient
    tasks: list[asyncio.Task[object]] = field(default_factory=list)

    def ask(self, tenant: str, **body: object) -> None:
        asked = {"model": "tiny", "prompt": "a b c", "max_tokens": 12, **body}
        post = self.client.post("/v1/completions", json=asked, headers={"x-api-key": tenant})
        self.tasks.append(asyncio.create_task(post))

    async def kill(self) -> None:
        """As by kill -9: what was not brought is lost."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.fleet.close()
        await self.client.aclose()


@pytest.fixture
def accounts(tmp_path: Path) -> FakeAccounts:
    store = LedgerStore(create_engine(f"sqlite:///{tmp_path / 'ledger.db'}"))
    return FakeAccounts(store, Lending(lambda name: TENANTS[name].limits, clock=lambda: 0.0, wall=lambda: 0.0))


def house(accounts: FakeAccounts, backends: Sequence[FakeBackend], name: str = "router-0") -> House:
    fleet = Fleet(name)
    for backend in backends:
        fleet.put(backend.card, backend)
    books = Books(Quotas(name, accounts), Scribe(accounts, fleet.counts), accounts, wall=lambda: 0.0)
    books.prices = Prices(by_model={"tiny": Price(prompt=1.0, completion=2.0)})
    door = Door(identify=lambda key: Identity(tenant=TENANTS[key or ""], key_id=f"key of {key}"))
    app = build_app(Router(fleet, books=books), door=door, replays=Replays(ReplaySettings(seconds=60)))
    transport = httpx.ASGITransport(app=app)
    return House(fleet, books, httpx.AsyncClient(transport=transport, base_url="http://flow"))


def backend(number: int, *, is_stepped: bool = False) -> FakeBackend:
    return FakeBackend(replica_card(f"r{number}", model_card("tiny", adapter_card("pirate"))), is_stepped=is_stepped)


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
    await one.books.scribe.flush()
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
    await one.books.scribe.flush()
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
    await one.books.scribe.flush()
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
    await asyncio.sleep(0.01)
    slow.tasks[0].cancel()
    await asyncio.gather(*slow.tasks, return_exceptions=True)
    await slow.books.scribe.flush()
    assert sums(accounts, tenant="acme")["completion_tokens"] == stepped.spent["acme"].completion_tokens
    await slow.books.quotas.renew()
    rates = slow.books.rates(TENANTS["acme"])
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
    await asyncio.sleep(0.01)
    slow.tasks[0].cancel()
    await asyncio.gather(*slow.tasks, return_exceptions=True)
    await slow.books.scribe.flush()
    assert sums(accounts, tenant="acme")["prompt_tokens"] == 0, "no row tells of what nobody knows"
    await slow.books.quotas.renew()
    rates = slow.books.rates(TENANTS["acme"])
    assert [rate.remaining for rate in rates.values()] == [99, 100_000 - (5 + 8) - (100 + 8)]
    await slow.kill()


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_what_the_service_does_not_get_done_uses_up_no_limit(accounts: FakeAccounts, is_accepted: bool) -> None:
    stepped = backend(0, is_stepped=True)
    slow = house(accounts, [stepped])
    if not is_accepted:
        stepped.refusal = Overloaded("full", None, {"retry_after_s": 2})
    slow.ask("acme")
    while is_accepted and not stepped.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    stepped.die()
    [answer] = await asyncio.gather(*slow.tasks)
    assert isinstance(answer, httpx.Response)
    assert answer.status_code >= 500
    await slow.books.quotas.renew()
    assert [rate.remaining for rate in slow.books.rates(TENANTS["acme"]).values()] == [100, 100_000]
    await slow.kill()


@pytest.mark.parametrize("seed", range(100))
async def test_whatever_dies_and_whenever_every_token_is_in_a_row_or_unattributed(
    accounts: FakeAccounts, seed: int
) -> None:
    """Two routers and two replicas; at a random point one of the four dies, and answers of accounts get lost."""
    drawn = random.Random(seed)
    accounts.drops = random.Random(seed)
    replicas = [backend(number, is_stepped=True) for number in range(2)]
    houses = [house(accounts, replicas, f"router-{number}") for number in range(2)]
    dies_at = drawn.randrange(40)
    for turn in range(45):
        if turn == dies_at:
            victim = drawn.randrange(4)
            if victim < 2:
                await houses.pop(victim).kill()
            else:
                replicas[victim - 2].die()
        for each in houses:
            if drawn.random() < 0.4 and turn < 40:
                each.ask(drawn.choice(["acme", "beta"]), n=drawn.randint(1, 2), stream=drawn.random() < 0.5)
            if each.tasks and drawn.random() < 0.05:
                drawn.choice(each.tasks).cancel()
            if drawn.random() < 0.2:
                await flushed(each, is_sure=False)
        await asyncio.sleep(0)
        for replica in replicas:
            replica.step()
    while not all(task.done() for each in houses for task in each.tasks):
        for replica in replicas:  # also what moved from a replica that died
            replica.step()
        await asyncio.sleep(0)
    while any(replica.num_live for replica in replicas):
        for replica in replicas:
            replica.step()
    for each in houses:
        await flushed(each, is_sure=False)
    for replica in replicas:  # the next hello
        for each in houses:
            each.fleet.hear(await replica.hello("anybody"))
    told = [
        Counted(replica_id=replica.card.replica_id, model="tiny", spent=spent)
        for replica in replicas
        for spent in replica.spent.values()
    ]
    for each in houses:
        await flushed(each, is_sure=True)
    accounts.drops = None
    await accounts.record((), told)
    for tenant in TENANTS:
        spent = [replica.spent.get(tenant, Spent(flow=tenant)) for replica in replicas]
        found = sums(accounts, tenant=tenant)
        assert {name: found[name] for name in SPENT} == {
            name: sum(getattr(each, name) for each in spent) for name in SPENT
        }
        assert found["cost"] == 1000 * found["prompt_tokens"] + 2000 * found["completion_tokens"]
    assert sums(accounts)["requests"] == accounts.num_recorded
    for each in houses:
        await each.kill()


async def flushed(house: House, *, is_sure: bool) -> None:
    while True:
        try:
            await house.books.scribe.flush()
            return
        except ConnectionError:
            if not is_sure:
                return


async def test_the_ledger_being_away_holds_up_no_request_and_loses_no_row(one: House, accounts: FakeAccounts) -> None:
    accounts.drops = random.Random(0)
    for _ in range(20):
        one.ask("beta")
    assert {json.loads(each.text)["usage"]["completion_tokens"] for each in await asyncio.gather(*one.tasks)} == {12}  # type: ignore[attr-defined]
    assert one.books.scribe.num_waiting == 20
    await flushed(one, is_sure=True)
    assert (one.books.scribe.num_waiting, sums(accounts)["requests"]) == (0, 20)
