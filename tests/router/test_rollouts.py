"""Canaries as routers see them: which requests count, who decides, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.core.adapters import PublishedAdapter
from serve_app.core.errors import EngineFailed, InvalidRequest, Overloaded, ServeError
from serve_app.core.prompt import Prompt
from serve_app.router.fleet import Fleet
from serve_app.router.published_sources import FileSource
from serve_app.router.publishing import Publisher, Publishing
from serve_app.router.rollout import RolloutSettings
from serve_app.router.rollouts import Rollouts
from serve_app.router.router import Router
from serve_app.tenants.published import PublishedFile
from tests.fakes import FakeBackend, model_card, replica_card

OPERATOR = Publisher()
NAME = "tiny:sql"
PROMPT = Prompt(parts=("a",))
SETTINGS = RolloutSettings(requests=4, steps=(0.5,), max_slowdown=1e6)


@dataclass(slots=True)
class House:
    """Two routers with one replica; both read what is published in one file."""

    root: Path
    backend: FakeBackend = field(default_factory=lambda: FakeBackend(replica_card("r0", model_card())))
    fleets: list[Fleet] = field(default_factory=list)
    publishings: list[Publishing] = field(default_factory=list)
    rollouts: list[Rollouts] = field(default_factory=list)
    sources: list[FileSource] = field(default_factory=list)

    def add_router(self) -> None:
        fleet = Fleet(f"router-{len(self.fleets)}")
        source = FileSource(PublishedFile(self.root / "adapters.json"))
        publishing = Publishing(fleet, source, roots=[str(self.root)])
        self.fleets.append(fleet)
        self.sources.append(source)
        self.publishings.append(publishing)
        self.rollouts.append(Rollouts(publishing, fleet, SETTINGS))

    async def look(self) -> None:
        """Have both routers hear what is published, and what the replica says."""
        for source, publishing in zip(self.sources, self.publishings, strict=True):
            await source.look()
            publishing.put(self.backend.card, self.backend)

    async def publish(self, folder: str, *, canary: float | None = None) -> PublishedAdapter:
        made = self.root / folder
        made.mkdir()
        (made / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (made / "adapter_model.safetensors").write_bytes(folder.encode())
        found = await self.publishings[0].publish(NAME, str(made), OPERATOR, canary=canary)
        await self.look()
        return found

    def observe(self, version: str, error: ServeError | None = None, *, router: int = 0) -> None:
        """Tell a router that a request is over, which nobody has computed."""
        request = CompletionRequest(model=f"{NAME}@{version}", prompts=(PROMPT,))
        run = Router(self.fleets[router]).open(request)
        self.rollouts[router].observe(run, error)

    async def idle(self) -> None:
        while any(each.is_busy for each in self.rollouts):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await self.look()

    def meaning(self, router: int = 0) -> PublishedAdapter:
        found = self.publishings[router].known.find("tiny", "sql")
        assert found is not None
        return found


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(root=tmp_path)
    made.add_router()
    made.add_router()
    await made.look()
    yield made
    for fleet in made.fleets:
        await fleet.close()


@pytest.fixture
async def tried(house: House) -> PublishedAdapter:
    """An adapter with a canary at 10 %."""
    await house.publish("v1")
    return await house.publish("v2", canary=0.1)


def canary_of(adapter: PublishedAdapter) -> str:
    assert adapter.canary is not None
    return adapter.canary.version


async def test_a_canary_gets_its_share_of_users_and_pinned_requests_get_none(
    house: House, tried: PublishedAdapter
) -> None:
    router = Router(house.fleets[0])

    def version_of(model: str, user: str | None) -> str:
        request = CompletionRequest(model=model, prompts=(PROMPT,), user=user)
        [lowered] = router.lowered(request, "r")
        return lowered.model.version

    drawn = {user: version_of(NAME, user) for user in map(str, range(400))}
    assert Counter(drawn.values())[canary_of(tried)] in range(20, 61)
    assert all(version_of(NAME, user) == version for user, version in drawn.items()), "users stay with theirs"
    assert {version_of(f"{NAME}@{tried.version}", user) for user in drawn} == {tried.version}
    alone = Counter(version_of(NAME, None) for _ in range(400))
    assert alone[canary_of(tried)] in range(10, 81), "without a user each request is drawn by itself"
    assert {version_of("tiny:sql*0.5", user) for user in list(drawn)[:50]} == {version_of("tiny:sql*0.5", None)}


async def test_a_wider_share_keeps_those_who_had_the_canary(house: House, tried: PublishedAdapter) -> None:
    router = Router(house.fleets[0])

    def with_canary() -> set[str]:
        lowered = {
            user: router.lowered(CompletionRequest(model=NAME, prompts=(PROMPT,), user=user), "r")[0]
            for user in map(str, range(200))
        }
        return {user for user, each in lowered.items() if each.model.version == canary_of(tried)}

    before = with_canary()
    await house.publishings[0].decide("widen", tried, 0.5, "no worse")
    await house.look()
    assert before < with_canary()


async def test_requests_that_are_no_worse_widen_it_until_it_is_what_the_name_means(
    house: House, tried: PublishedAdapter
) -> None:
    for _ in range(2):
        for version in (tried.version, canary_of(tried)):
            for _ in range(SETTINGS.requests):
                house.observe(version)
        await house.idle()
    found = house.meaning()
    assert (found.version, found.canary, found.by) == (canary_of(tried), None, "operator")
    assert found.previous is not None
    assert found.previous[0] == tried.version
    assert house.rollouts[0].decisions == Counter({"widen": 2})


async def test_failures_of_the_service_roll_it_back_and_refusals_of_clients_do_not(
    house: House, tried: PublishedAdapter
) -> None:
    for _ in range(9):
        house.observe(tried.version)
        house.observe(canary_of(tried), InvalidRequest("no", "prompt"))
        house.observe(canary_of(tried), Overloaded("full"))
    await house.idle()
    assert house.meaning().canary == tried.canary
    for _ in range(3):
        house.observe(canary_of(tried), EngineFailed("no numbers"))
    await house.idle()
    found = house.meaning()
    assert (found.version, found.canary) == (tried.version, None)
    assert house.rollouts[0].decisions == Counter({"roll back": 1})


async def test_of_two_routers_that_widen_at_once_one_is_heard(house: House, tried: PublishedAdapter) -> None:
    await asyncio.gather(*(each.decide("widen", tried, 0.5, "no worse") for each in house.publishings))
    await house.look()
    for router in range(2):
        canary = house.meaning(router).canary
        assert canary is not None
        assert canary.share == 0.5
    assert house.meaning().published_at == tried.published_at


async def test_a_rollback_by_one_router_is_final_for_the_other(house: House, tried: PublishedAdapter) -> None:
    await house.publishings[0].decide("roll back", tried, None, "it fails")
    await house.publishings[1].decide("widen", tried, 0.5, "no worse")
    await house.look()
    assert [house.meaning(router).canary for router in range(2)] == [None, None]
    assert house.meaning().version == tried.version


async def test_each_router_counts_its_own_requests_anew_at_each_share(house: House, tried: PublishedAdapter) -> None:
    for _ in range(SETTINGS.requests - 1):
        house.observe(canary_of(tried), router=1)
        house.observe(tried.version, router=1)
    assert counted(house, router=1) == SETTINGS.requests - 1
    assert counted(house, router=0) == 0
    await house.publishings[0].decide("widen", tried, 0.5, "no worse")
    await house.look()
    assert counted(house, router=1) == 0


async def test_a_verdict_about_an_adapter_that_was_withdrawn_is_refused(house: House, tried: PublishedAdapter) -> None:
    await house.publishings[0].withdraw(NAME, OPERATOR)
    with pytest.raises(ServeError):
        await house.publishings[0].decide("roll back", tried, None, "it fails")


async def test_an_adapter_without_a_canary_is_not_counted(house: House) -> None:
    found = await house.publish("v1")
    house.observe(found.version)
    assert house.rollouts[0].num_canaries == 0
    entry = house.publishings[0].entry("tiny", "sql")
    assert house.rollouts[0].told(entry) == replace(entry, canary=None)


async def test_a_canary_with_too_few_requests_is_held_and_told_once_and_goes_on_when_they_come(
    house: House, tried: PublishedAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    [rollouts, _] = house.rollouts
    house.observe(canary_of(tried))
    rollouts.look()
    assert not rollouts.held
    rollouts.settings = replace(SETTINGS, hold_after_s=1e-6)
    for _ in range(2):
        rollouts.look()
        await house.idle()
    assert [each.adapter for each in rollouts.held] == [tried]
    assert house.meaning().canary == tried.canary
    assert rollouts.decisions == Counter({"hold": 1})
    listed = rollouts.told(house.publishings[0].entry("tiny", "sql")).canary
    assert listed is not None
    why = "requests that came to this router: 1 of it, 0 of the version beside it; 4 of each are needed"
    assert listed.held == why
    told = [each.getMessage() for each in caplog.records if "hold tiny:sql" in each.getMessage()]
    assert [each.endswith(why) for each in told] == [True]
    for version in (tried.version, canary_of(tried)):
        for _ in range(SETTINGS.requests):
            house.observe(version)
    await house.idle()
    assert rollouts.decisions == Counter({"hold": 1, "widen": 1})


def counted(house: House, *, router: int) -> int:
    canary = house.rollouts[router].told(house.publishings[router].entry("tiny", "sql")).canary
    assert canary is not None
    return canary.counted.requests
