"""Adapters on their way from a publisher to every replica, also where replicas and routers come and go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from serve_app.core.adapters import AdapterSet
from serve_app.core.backend import NOTHING
from serve_app.core.cards import AdapterCard, ModelCard, ReplicaCard
from serve_app.core.errors import (
    AdapterNotFound,
    Forbidden,
    InvalidRequest,
    ModelLoading,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from serve_app.core.tenants import Rights
from serve_app.router.fleet import Fleet, as_one
from serve_app.router.published_sources import FileSource, MemorySource
from serve_app.router.publishing import MAX_READING, RETRY_S, Publisher, Publishing
from serve_app.tenants.published import Change, PublishedFile
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card, settle

OPERATOR = Publisher()


class SlowSource(MemorySource):
    """A set that is not known before it was looked for, or ever, where nobody answers."""

    def __init__(self, known: AdapterSet, *, answers: bool = True) -> None:
        super().__init__()
        self.published = None  # type: ignore[assignment]
        self._known, self._answers = known, answers

    async def look(self) -> None:
        if self._answers:
            self.published = self._known


class TellingBackend(FakeBackend):
    """A replica with another router, which hears of a change with the last of so many hellos."""

    def __init__(self, card: ReplicaCard, *, num_hellos: int) -> None:
        super().__init__(card)
        self.num_hellos = num_hellos

    async def hello(self, router_id: str, heard: Mapping[str, int] = NOTHING) -> ReplicaCard:
        self.num_hellos = max(0, self.num_hellos - 1)
        return replace(self.card, num_routers_behind=self.num_hellos)


class BusyBackend(FakeBackend):
    """A replica that has no time for what is published."""

    async def apply_adapters(self, published: AdapterSet) -> ModelCard:
        raise Overloaded("busy", None, {"retry_after_s": 1})


class SlowBackend(FakeBackend):
    """A replica that stages only when it is told to go on."""

    def __init__(self, card: ReplicaCard) -> None:
        super().__init__(card)
        self.entered, self.goes_on = asyncio.Event(), asyncio.Event()

    async def stage_adapter(self, name: str, path: str, version: str) -> AdapterCard:
        self.entered.set()
        await self.goes_on.wait()
        return await super().stage_adapter(name, path, version)


@dataclass(slots=True)
class House:
    """Two replicas of `tiny` behind a router, with folders of adapters below one root."""

    root: Path
    fleet: Fleet
    publishing: Publishing
    backends: list[FakeBackend]

    def folder(self, name: str, weights: bytes = b"v1") -> str:
        made = self.root / name
        made.mkdir(exist_ok=True)
        (made / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (made / "adapter_model.safetensors").write_bytes(weights)
        return str(made)

    def greet(self) -> None:
        for each in self.backends:
            self.publishing.put(each.card, each)

    def meaning(self, name: str = "tiny:sql") -> str:
        return self.fleet.resolve(name).version

    async def publish(self, name: str = "tiny:sql", weights: bytes = b"v1", *, in_place: bool = False) -> str:
        folder = self.folder(name.replace(":", "-"), weights)
        return (await self.publishing.publish(name, folder, OPERATOR, in_place=in_place)).version


def card_of(number: int, *adapters: AdapterCard, model: str = "tiny") -> ReplicaCard:
    return replica_card(f"r{number}", model_card(model, *adapters))


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    fleet = Fleet("router-0")
    made = House(
        root=tmp_path,
        fleet=fleet,
        publishing=Publishing(fleet, roots=[str(tmp_path)], clock=lambda: 7.0),
        backends=[FakeBackend(card_of(number)) for number in range(2)],
    )
    made.greet()
    yield made
    await fleet.close()


async def test_a_published_adapter_is_served_by_every_replica_before_the_call_returns(house: House) -> None:
    version = await house.publish()
    assert house.meaning() == version
    assert [link.card.model.adapters_revision for link in house.fleet.links_for(house.fleet.resolve("tiny:sql"))] == [
        1,
        1,
    ]


async def test_an_adapter_is_staged_everywhere_before_it_means_anything(house: House) -> None:
    house.backends[1].stage_refusal = InvalidRequest("its outputs overflow", "lora_path")
    with pytest.raises(InvalidRequest, match="its outputs overflow"):
        await house.publish()
    assert house.publishing.known.revision == 0
    with pytest.raises((AdapterNotFound, InvalidRequest)):
        house.fleet.resolve("tiny:sql")


async def test_of_several_refusals_the_one_for_ever_is_told(house: House) -> None:
    house.backends[0].stage_refusal = Overloaded("no room", None, {"retry_after_s": 1})
    house.backends[1].stage_refusal = InvalidRequest("inert", "lora_path")
    with pytest.raises(InvalidRequest, match="inert"):
        await house.publish()


async def test_a_replica_that_dies_while_it_stages_holds_nobody_up(house: House) -> None:
    house.backends[1].die(ConnectionError("gone"))
    version = await house.publish()
    assert house.backends[0].card.model.adapter("sql") == house.backends[0].staged[version]


async def test_no_replica_is_no_place_to_publish(house: House) -> None:
    for each in house.backends:
        each.die(ConnectionError("gone"))
    with pytest.raises(ModelLoading):
        await house.publish()
    assert house.publishing.known.revision == 0


async def test_a_name_is_replaced_in_place_and_rolled_back(house: House) -> None:
    first = await house.publish()
    with pytest.raises(InvalidRequest, match="already been loaded"):
        await house.publish(weights=b"v2")
    second = await house.publish(weights=b"v2", in_place=True)
    assert (first == second, house.meaning()) == (False, second)
    back = await house.publishing.roll_back("tiny:sql", OPERATOR)
    assert (back.version, house.meaning()) == (first, first)


async def test_a_version_before_can_still_be_computed_with_when_it_was_resolved_before(house: House) -> None:
    await house.publish()
    before = house.fleet.resolve("tiny:sql")
    await house.publish(weights=b"v2", in_place=True)
    assert len(house.fleet.links_for(before)) == 2


async def test_a_version_that_no_replica_can_stage_any_more_is_not_rolled_back_to(house: House) -> None:
    await house.publish()
    second = await house.publish(weights=b"v2", in_place=True)
    house.backends[0].stage_refusal = InvalidRequest("changed meanwhile", "lora_path")
    with pytest.raises(InvalidRequest, match="changed meanwhile"):
        await house.publishing.roll_back("tiny:sql", OPERATOR)
    assert house.meaning() == second


async def test_a_withdrawn_adapter_is_not_there(house: House) -> None:
    await house.publish()
    assert await house.publishing.withdraw("sql", OPERATOR) == "tiny:sql"
    with pytest.raises((AdapterNotFound, InvalidRequest)):
        house.fleet.resolve("tiny:sql")
    with pytest.raises(AdapterNotFound, match="cannot be found"):
        await house.publishing.withdraw("sql", OPERATOR)


async def test_an_adapter_of_a_folder_is_replaced_rolled_back_and_withdrawn(tmp_path: Path) -> None:
    fleet = Fleet("router-0")
    backends = [FakeBackend(card_of(0, adapter_card("sql", "f0")))]
    house = House(tmp_path, fleet, Publishing(fleet, roots=[str(tmp_path)]), backends)
    house.greet()
    assert house.meaning() == "f0"
    with pytest.raises(InvalidRequest, match="already been loaded"):
        await house.publish()
    await house.publish(in_place=True)
    await house.publishing.roll_back("sql", OPERATOR)
    assert house.meaning() == "f0"
    await house.publishing.withdraw("sql", OPERATOR)
    with pytest.raises((AdapterNotFound, InvalidRequest)):
        house.fleet.resolve("tiny:sql")
    await fleet.close()


async def test_a_replica_that_starts_takes_requests_when_it_has_what_is_published(house: House) -> None:
    version = await house.publish()
    late = FakeBackend(card_of(2, adapter_card("sql", "folder")))
    house.publishing.put(late.card, late)
    assert len(house.fleet.links_of("tiny")) == 2
    await until(lambda: len(house.fleet.links_of("tiny")) == 3)
    cards = [link.card.model.adapter("sql") for link in house.fleet.links_of("tiny")]
    assert {card.version for card in cards if card is not None} == {version}


async def test_a_router_that_starts_puts_no_replica_to_use_before_it_knows_what_is_published() -> None:
    fleet = Fleet("router-0")
    for_ever = Publishing(fleet, SlowSource(AdapterSet(), answers=False))
    backend = FakeBackend(card_of(0))
    for_ever.put(backend.card, backend)
    await asyncio.sleep(0)
    assert fleet.links_of() == []
    source = SlowSource(AdapterSet())
    at_last = Publishing(fleet, source)
    at_last.put(backend.card, backend)
    await until(lambda: source.published is not None)
    at_last.refresh()
    assert len(fleet.links_of()) == 1
    await fleet.close()


async def test_a_hello_that_began_before_a_change_does_not_undo_it(house: House) -> None:
    old = [each.card for each in house.backends]
    version = await house.publish()
    for card, backend in zip(old, house.backends, strict=True):
        house.publishing.put(card, backend)
    assert house.meaning() == version


async def test_a_replica_that_was_out_of_reach_is_told_when_it_is_there_again(house: House) -> None:
    source = MemorySource()
    fleet = Fleet("router-0")
    other = Publishing(fleet, source, roots=[str(house.root)])
    backend = FakeBackend(card_of(0))
    other.put(backend.card, backend)
    await source.change_adapters(change_to("v9"))  # by another router
    other.refresh()
    await until(lambda: fleet.cards["tiny"].adapters_revision == 1)
    assert fleet.resolve("tiny:sql").version == "v9"
    await fleet.close()


async def test_other_routers_have_heard_before_the_call_returns(house: House) -> None:
    backend = TellingBackend(card_of(2), num_hellos=3)
    house.publishing.put(backend.card, backend)
    await house.publish()
    assert backend.num_hellos == 0


async def test_a_replica_that_never_applies_is_told_to_the_publisher(tmp_path: Path) -> None:
    fleet = Fleet("router-0")
    made = Publishing(fleet, roots=[str(tmp_path)], applying_s=0.2)
    house = House(tmp_path, fleet, made, [FakeBackend(card_of(0)), BusyBackend(card_of(1))])
    house.greet()
    with pytest.raises(Unavailable, match=r"tiny:sql is changed, but some replicas"):
        await house.publish()
    assert made.known.revision == 1
    await fleet.close()


@pytest.mark.parametrize("name", ["nobody:sql", "tiny:", "", "a/b"])
async def test_a_name_without_a_base_is_refused(house: House, name: str) -> None:
    with pytest.raises((ModelNotFound, InvalidRequest)):
        await house.publishing.publish(name, house.folder("x"), OPERATOR)


@pytest.mark.parametrize("name", ["tiny:a*b", "tiny:a+b", "tiny:a@b", "tiny:a b", "tiny:" + "x" * 97, "tiny:../x"])
async def test_a_name_that_no_address_can_have_is_refused(house: House, name: str) -> None:
    with pytest.raises(InvalidRequest, match="lora_name"):
        await house.publishing.publish(name, house.folder("x"), OPERATOR)


async def test_a_bare_name_needs_one_base(house: House) -> None:
    assert (await house.publishing.publish("law", house.folder("law"), OPERATOR)).base == "tiny"
    other = FakeBackend(card_of(7, model="other"))
    house.publishing.put(other.card, other)
    await until(lambda: "other" in house.fleet.cards)
    with pytest.raises(ModelNotFound, match="base:adapter"):
        await house.publishing.publish("art", house.folder("art"), OPERATOR)


async def test_a_tenant_publishes_under_its_own_names_alone(house: House) -> None:
    acme = Publisher(name="acme", key_id="key-1", rights=Rights(("tiny:acme-*",)))
    found = await house.publishing.publish("tiny:acme-sql", house.folder("a"), acme)
    assert (found.by, found.published_at) == ("acme", 7.0)
    await house.publish()
    for work in (
        house.publishing.publish("tiny:sql", house.folder("b"), acme, in_place=True),
        house.publishing.withdraw("tiny:sql", acme),
        house.publishing.roll_back("tiny:sql", acme),
    ):
        with pytest.raises(Forbidden, match="publishes"):
            await work
    assert [each.id for each in house.publishing.listed()] == ["tiny:acme-sql", "tiny:sql"]


@pytest.mark.parametrize("name", ["tiny:sql", "nobody:sql", "tiny:", "sql", ""])
async def test_a_tenant_does_not_learn_which_bases_are_served(house: House, name: str) -> None:
    stranger = Publisher(name="acme", key_id="key-1", rights=Rights(("other:acme-*",)))
    with pytest.raises(Forbidden, match="publishes"):
        await house.publishing.publish(name, house.folder("a"), stranger)


async def test_folders_elsewhere_are_refused_whether_they_are_there_or_not(house: House, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("x")
    refused = [
        "/etc/passwd", "/nowhere/at/all", str(outside), f"{tmp_path}/../{outside.name}", f"{tmp_path}/x/../y",
        str(tmp_path), str(tmp_path / "link"), str(tmp_path / "loop"), str(tmp_path / "file"), str(tmp_path / "none"),
        "", "a\0b", "x" * 5000, f"{tmp_path}/{'y' * 300}", "~", "\ud800",
    ]  # fmt: skip
    messages = set()
    for path in refused:
        with pytest.raises(Forbidden, match="lora_path") as error:
            await house.publishing.publish("tiny:sql", path, OPERATOR)
        messages.add(error.value.message.partition("; found")[0])
    assert len(messages) == 1
    assert all(not each.staged for each in house.backends)


async def test_files_that_lead_out_of_a_folder_are_refused(house: House, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-secret"
    outside.write_bytes(b"secret")
    folder = Path(house.folder("sql"))
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to(outside)
    with pytest.raises(InvalidRequest, match="leads out of the folder"):
        await house.publishing.publish("tiny:sql", str(folder), OPERATOR)


async def test_the_folder_of_the_models_own_adapters_is_allowed(tmp_path: Path) -> None:
    fleet = Fleet("router-0")
    card = card_of(0)
    card = replace(card, model=replace(card.model, adapters_root=str(tmp_path)))
    house = House(tmp_path, fleet, Publishing(fleet), [FakeBackend(card)])
    house.greet()
    version = await house.publish()
    assert house.meaning() == version
    await fleet.close()


async def test_what_is_listed_is_what_is_served(house: House) -> None:
    await house.publish()
    second = await house.publish(weights=b"v2", in_place=True)
    [entry] = house.publishing.listed()
    assert (entry.id, entry.version, entry.by, entry.replicas, entry.ready_replicas, entry.reason) == (
        "tiny:sql",
        second,
        "operator",
        2,
        2,
        None,
    )
    assert entry.previous is not None
    assert house.publishing.known.revision == 2


async def test_a_publisher_who_leaves_does_not_leave_half_of_it(house: House) -> None:
    slow = SlowBackend(card_of(2))
    house.publishing.put(slow.card, slow)
    task = asyncio.create_task(house.publish())
    await slow.entered.wait()
    task.cancel()
    slow.goes_on.set()
    await until(lambda: house.publishing.known.revision == 1)
    await until(lambda: all(each.card.model.adapters_revision == 1 for each in house.backends))


async def test_routers_of_one_machine_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "adapters.json"
    one, other = FileSource(PublishedFile(path)), FileSource(PublishedFile(path))
    await other.look()
    assert other.published == AdapterSet()
    after = await one.change_adapters(change_to("v1"))
    assert one.published == after
    await other.look()
    assert other.published == after


async def test_a_damaged_file_is_told_once_and_what_was_known_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "adapters.json"
    source = FileSource(PublishedFile(path))
    after = await source.change_adapters(change_to("v1"))
    path.write_text("{")
    for _ in range(3):
        await source.look()
    assert source.published == after
    assert len([each for each in caplog.records if "cannot be read" in each.message]) == 1
    with pytest.raises(Unavailable, match="cannot be read"):
        await source.change_adapters(change_to("v2"))


def test_names_mean_what_the_replicas_say_that_are_furthest() -> None:
    old = model_card("tiny", adapter_card("sql", "v1"), adapter_card("gone", "g1"))
    new = replace(model_card("tiny", adapter_card("sql", "v2")), adapters_revision=4)
    one = as_one([old, old, new])
    assert [(each.name, each.version) for each in one.adapters] == [("sql", "v2")]
    assert [(each.name, each.version) for each in one.staged] == [("gone", "g1"), ("sql", "v1")]
    assert one.adapters_revision == 4


def change_to(version: str) -> Change:
    return Change(action="publish", base="tiny", name="sql", version=version, path="/a", in_place=True)


async def until(holds: object) -> None:
    assert callable(holds)
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class UnreachedBackend(FakeBackend):
    """A replica that cannot fetch what is published while `is_unreached`."""

    is_unreached = True

    async def apply_adapters(self, published: AdapterSet) -> ModelCard:
        model = await super().apply_adapters(published)
        reason = "the store is gone" if self.is_unreached else None
        adapters = tuple(replace(each, reason=reason, may_come=self.is_unreached) for each in model.adapters)
        self.card = replace(self.card, model=replace(model, adapters=adapters))
        return self.card.model


async def test_a_replica_that_could_not_fetch_an_adapter_is_told_of_it_again() -> None:
    now = [1000.0]
    fleet, source = Fleet("router-0"), MemorySource()
    publishing = Publishing(fleet, source, clock=lambda: now[0])
    await source.change_adapters(Change(action="publish", base="tiny", name="sql", version="v1", path="s3://a/sql"))
    backend = UnreachedBackend(replica_card("r0", model_card("tiny")))
    publishing.put(backend.card, backend)
    await settle()
    assert fleet.cards["tiny"].adapters[0].reason == "the store is gone"
    backend.is_unreached = False
    publishing.put(backend.card, backend)
    await settle()
    assert fleet.cards["tiny"].usable_adapters == (), "not at every look"
    now[0] += RETRY_S
    publishing.put(backend.card, backend)
    await settle()
    assert [each.name for each in fleet.cards["tiny"].usable_adapters] == ["sql"]
    await fleet.close()


async def test_a_folder_is_published_while_a_store_does_not_answer(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def fetch(_: object, url: str) -> str:
        answers.wait()
        return "f" * 32

    monkeypatch.setattr("serve_app.catalog.published.PublishedFiles.fetch", fetch)
    house.publishing.roots += ("https://files.example.org/adapters",)
    urls = [f"https://files.example.org/adapters/{number}" for number in range(MAX_READING)]
    waiting = [
        asyncio.create_task(house.publishing.publish(f"tiny:far-{number}", url, OPERATOR))
        for number, url in enumerate(urls)
    ]
    try:
        await settle()
        assert await asyncio.wait_for(house.publish(), 60) == house.meaning()
    finally:
        answers.set()
    await asyncio.gather(*waiting)
