"""A share of an alias's requests is computed by a second version, too: nobody who asked sees, waits or pays for it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import httpx
import pytest

from serve_app.core.errors import EngineFailed
from serve_app.core.tenants import Identity, Rights, Tenant
from serve_app.http.app import build_app
from serve_app.http.guard import OPEN_DOOR, Door
from serve_app.router.admission import Admission
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from serve_app.router.shadow import FLOW, MAX_AT_ONCE, Outcome, Shadows
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card
from tests.flow.bookkeeping import FakeAccounts, backend, house
from tests.flow.stack import running_stack
from tests.flow.test_ledger import accounts, sums

NEW = "tiny:new"
BODY = {"model": "prod", "prompt": "Hello", "max_tokens": 4}
ALIASES = {"prod": {"to": "tiny:sql", "shadow": {NEW: 100}}}
SLOTS = 32

__all__ = ["accounts"]


def replica(*, slots: int = SLOTS, is_stepped: bool = False) -> FakeBackend:
    card = replace(
        model_card("tiny", adapter_card("sql"), adapter_card("new")), max_num_sequences=slots, max_waiting=64
    )
    return FakeBackend(replica_card("r0", card), is_stepped=is_stepped)


class Shadowed:
    """A router whose alias has a shadow, and its client."""

    def __init__(self, backend: FakeBackend, door: Door = OPEN_DOOR) -> None:
        self.backend = backend
        self.fleet = Fleet("router-0", aliases=ALIASES)
        self.fleet.put(backend.card, backend)
        self.admission = Admission(lambda: self.fleet.rooms)
        self.shadows = Shadows(self.fleet, self.admission)
        router = Router(self.fleet, admission=self.admission, shadows=self.shadows)
        app = build_app(router, door=door)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    async def ask(self, **body: object) -> httpx.Response:
        answer = await self.client.post("/v1/completions", json=BODY | body)
        assert answer.status_code == 200, answer.text
        return answer

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_so():  # noqa: ASYNC110, others do it
                await asyncio.sleep(0)

    async def over(self) -> None:
        await self.until(lambda: not self.shadows.num_running)

    def outcomes(self, address: str = NEW) -> dict[str, int]:
        tally = self.shadows.tallies.get(address)
        return {} if tally is None else {outcome.value: count for outcome, count in tally.outcomes.items()}

    def asked(self, flow: str) -> list[str]:
        """The models that the replica was asked for in the name of this flow."""
        every = (each for submission in self.backend.submissions for each in submission)
        return [each.model.name for each in every if each.share.flow == flow]


@pytest.fixture
async def one() -> AsyncIterator[Shadowed]:
    made = Shadowed(replica())
    yield made
    await made.client.aclose()
    await made.fleet.close()


async def test_the_shown_answer_is_as_without_and_the_shadow_is_counted_apart(
    one: Shadowed, caplog: pytest.LogCaptureFixture
) -> None:
    one.fleet.rename({"prod": "tiny:sql"})
    alone = (await one.ask(seed=1)).json()
    one.fleet.rename(ALIASES)
    with caplog.at_level(logging.INFO, "serve_app"):
        answer = await one.client.post("/v1/completions", json=BODY | {"seed": 1}, headers={"x-request-id": "first"})
        await one.over()
    assert answer.headers["x-served-model"] == "tiny:sql@v1"
    assert answer.json()["choices"] == alone["choices"]
    assert answer.json()["usage"] == alone["usage"]
    assert (one.outcomes(), one.asked(FLOW)) == ({"done": 1}, [NEW])
    assert one.asked("local") == ["tiny:sql", "tiny:sql"]
    lines = [json.loads(each.message) for each in caplog.records if each.name.startswith("serve_app")]
    assert sorted((each["event"], each["served"]) for each in lines if each["request_id"] == "first") == [
        ("completion", "tiny:sql@v1"),
        ("shadow", NEW),
    ]
    text = (await one.client.get("/metrics")).text
    assert f'serve_app_shadow_requests_total{{model="{NEW}",outcome="done",router="router-0"}} 1.0' in text
    assert f'serve_app_shadow_completion_tokens_total{{model="{NEW}",router="router-0"}} 4.0' in text
    assert f'serve_app_completion_tokens_total{{model="{NEW}"' not in text
    assert one.admission.free_slots("tiny") == SLOTS


async def test_a_share_of_the_requests_has_a_shadow_and_lists_have_none(one: Shadowed) -> None:
    one.fleet.rename({"prod": {"to": "tiny:sql", "shadow": {NEW: 50, "tiny": 0}}})
    for _ in range(64):
        await one.ask()
        await one.over()
    assert 0 < one.outcomes()["done"] < 64, "all or none is 1 of 2**63"
    before = len(one.asked(FLOW))
    await one.ask(model=["prod", "prod"])
    await one.ask(model="tiny:sql")
    assert len(one.asked(FLOW)) == before
    assert set(one.asked(FLOW)) == {NEW}


async def test_the_shadow_has_the_lowest_class_and_the_seed_of_the_request(one: Shadowed) -> None:
    await one.ask(seed=5, n=2)
    await one.over()
    every = [each for submission in one.backend.submissions for each in submission]
    shown, hidden = sorted(every, key=lambda each: each.share.flow == FLOW)
    assert (hidden.share.priority, hidden.sampling.seed, hidden.n) == ("batch", shown.sampling.seed, 2)
    assert hidden.share.weight < shown.share.weight


@pytest.mark.parametrize(
    ("target", "outcome"), [("tiny:nobody", Outcome.FAILED), ("asleep", Outcome.DROPPED), ("late", Outcome.DROPPED)]
)
async def test_a_shadow_that_cannot_be_computed_is_no_matter_of_the_request(
    one: Shadowed, target: str, outcome: Outcome
) -> None:
    one.fleet.expect(["tiny", "asleep", "late"])
    one.fleet.rest("asleep", model_card("asleep"))
    one.fleet.rename({"prod": {"to": "tiny:sql", "shadow": {target: 100}}})
    await one.ask(stream=True)
    await one.over()
    assert one.outcomes(target) == {outcome.value: 1}
    assert list(one.fleet.asleep) == ["asleep"], "nobody is woken for a shadow"


async def test_a_shadow_that_its_replica_refuses_is_counted_as_failed(one: Shadowed) -> None:
    broken = FakeBackend(replica_card("r1", replace(model_card("other"), max_num_sequences=SLOTS)))
    broken.refusal = EngineFailed("no")
    one.fleet.put(broken.card, broken)
    one.fleet.rename({"prod": {"to": "tiny:sql", "shadow": {"other": 100}}})
    await one.ask()
    await one.over()
    assert one.outcomes("other") == {"failed": 1}
    assert one.shadows.tallies["other"].completion_tokens == 0


async def test_shadows_begin_only_in_slots_that_nobody_needs() -> None:
    made = Shadowed(replica(slots=1))
    await made.ask()
    await made.over()
    assert (made.outcomes(), made.asked(FLOW)) == ({"dropped": 1}, [])
    await made.client.aclose()
    await made.fleet.close()


async def test_a_running_shadow_ends_as_soon_as_its_slot_is_needed() -> None:
    made = Shadowed(replica(slots=4, is_stepped=True))
    asking = [asyncio.create_task(made.ask(max_tokens=30))]
    await made.until(lambda: len(made.backend.submissions) == 2)
    asking += [asyncio.create_task(made.ask(model="tiny:sql", max_tokens=2)) for _ in range(3)]
    await made.until(lambda: len(made.backend.submissions) == 5)
    async with asyncio.timeout(60):
        while made.shadows.num_running:
            made.backend.step()
            await asyncio.sleep(0)
        assert made.outcomes() == {"dropped": 1}
        while not all(task.done() for task in asking):
            made.backend.step()
            await asyncio.sleep(0)
    assert len({len(task.result().json()["choices"]) for task in asking}) == 1
    assert any(each.startswith("shadow-") for each in made.backend.aborted)
    await made.client.aclose()
    await made.fleet.close()


async def test_there_are_never_more_at_once_than_the_bound() -> None:
    made = Shadowed(replica(is_stepped=True))
    asking = [asyncio.create_task(made.ask(max_tokens=2)) for _ in range(MAX_AT_ONCE + 3)]
    await made.until(lambda: len(made.backend.submissions) == 2 * MAX_AT_ONCE + 3)
    assert (made.shadows.num_running, made.outcomes()) == (MAX_AT_ONCE, {"dropped": 3})
    async with asyncio.timeout(60):
        while made.shadows.num_running or not all(task.done() for task in asking):
            made.backend.step()
            await asyncio.sleep(0)
    assert made.outcomes() == {"dropped": 3, "done": MAX_AT_ONCE}
    await made.client.aclose()
    await made.fleet.close()


async def test_a_shadow_outlives_its_client() -> None:
    made = Shadowed(replica(is_stepped=True))
    asking = asyncio.create_task(made.ask(max_tokens=3))
    await made.until(lambda: len(made.backend.submissions) == 2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(60):
        while made.shadows.num_running:
            made.backend.step()
            await asyncio.sleep(0)
    assert made.outcomes() == {"done": 1}
    await made.client.aclose()
    await made.fleet.close()


async def test_a_tenant_need_not_be_allowed_to_use_the_shadow_and_does_not_see_it() -> None:
    identity = Identity(tenant=Tenant(name="acme", rights=Rights(("tiny:sql",))))
    made = Shadowed(replica(), Door(identify=lambda _: identity))
    made.client.headers["x-api-key"] = "sa-1"
    await made.ask()
    await made.over()
    assert (made.outcomes(), made.asked(FLOW), made.asked("acme")) == ({"done": 1}, [NEW], ["tiny:sql"])
    assert "new" not in (await made.client.get("/v1/models")).text
    salts = {each.cache_salt for submission in made.backend.submissions for each in submission}
    assert len(salts) == 1, "its prefixes are found by its tenant alone"
    await made.client.aclose()
    await made.fleet.close()


async def test_the_ledger_has_no_row_of_a_shadow(accounts: FakeAccounts) -> None:
    made = backend(0)
    card = replace(made.card.model, max_num_sequences=8, max_waiting=8)
    made.card = replace(made.card, model=card)
    one = house(accounts, [made])
    one.fleet.rename({"prod": {"to": "tiny", "shadow": {"tiny:pirate": 100}}})
    one.ask("acme", model="prod")
    answer = await one.tasks[0]
    assert isinstance(answer, httpx.Response)
    async with asyncio.timeout(60):
        while not any(each.share.flow == FLOW for batch in made.submissions for each in batch):  # noqa: ASYNC110
            await asyncio.sleep(0)
        while made.num_live:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await one.accounting.ledger_writer.flush()
    assert sums(accounts, tenant="acme")["requests"] == 1
    assert sums(accounts, tenant="acme")["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert sums(accounts, tenant="acme", adapter="pirate")["requests"] == 0
    await one.kill()


@pytest.mark.slow
async def test_two_engines_give_the_shown_texts_unchanged_beside_shadows() -> None:
    async with running_stack(num_replicas=2, max_num_sequences=16) as stack:
        asked = {"prompt": ["Once upon a time", "The cat"], "max_tokens": 16, "seed": 3, "temperature": 0.8}
        alone = await stack.complete(model="demo:pirate", **asked)
        hidden = {each: await stack.complete(model=each, **asked) for each in ("demo:shout", "demo")}
        stack.fleet.rename({"prod": {"to": "demo:pirate", "shadow": dict.fromkeys(hidden, 100)}})
        admission = Admission(lambda: stack.fleet.rooms)
        shadows = Shadows(stack.fleet, admission)
        shadowed = replace(stack, app=build_app(Router(stack.fleet, admission=admission, shadows=shadows)))
        for number in range(1, 4):
            answer = await shadowed.complete(model="prod", **asked)
            assert answer["choices"] == alone["choices"]
            async with asyncio.timeout(60):
                while shadows.num_running:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            for address, direct in hidden.items():
                tally = shadows.tallies[address]
                assert tally.outcomes == {Outcome.DONE: number}
                assert tally.completion_tokens == number * direct["usage"]["completion_tokens"]
        await stack.settled()
