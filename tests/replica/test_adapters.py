"""Names mean what the fleet has published, then what lies in the folder; versions stay while they are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.core.adapters import AdapterSet, Canary, PublishedAdapter
from serve_app.core.cards import AdapterCard, AdapterRecord, ModelCard
from serve_app.core.errors import AdapterUnusable, InvalidRequest, Overloaded, ServeError
from serve_app.core.names import ModelRef
from serve_app.replica.adapters import KEPT_S, ServedAdapters
from tests.fakes import adapter_card, model_card


class FakeAdapters:
    """An engine that takes everything in at once, but what is refused by version; in memory is what was staged."""

    def __init__(self) -> None:
        self.refusals: dict[str, ServeError] = {}
        self.resident: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self.dropped: set[str] = set()
        self.kept: frozenset[str] = frozenset()

    def stage(self, record: AdapterRecord) -> Future[AdapterCard]:
        found = self._take("stage", record)
        if record.version not in self.refusals:
            self.resident.add(record.version)
        return found

    def bind(self, record: AdapterRecord) -> Future[AdapterCard]:
        return self._take("bind", record)

    def is_resident(self, version: str) -> bool:
        return version in self.resident

    def keep(self, versions: frozenset[str]) -> None:
        self.kept = versions

    def drop(self, versions: frozenset[str]) -> Future[frozenset[str]]:
        self.dropped |= versions
        gone: Future[frozenset[str]] = Future()
        gone.set_result(versions)
        return gone

    def _take(self, call: str, record: AdapterRecord) -> Future[AdapterCard]:
        self.calls.append((call, record.version))
        taken: Future[AdapterCard] = Future()
        refusal = self.refusals.get(record.version)
        if refusal is None:
            taken.set_result(record.card())
        else:
            taken.set_exception(refusal)
        return taken


class Shelf:
    """A replica's adapters, over folders that are texts: a path is what its version begins with."""

    def __init__(self, *in_folder: AdapterCard) -> None:
        self.engine = FakeAdapters()
        self.used: frozenset[str] = frozenset()
        self.now = 0.0
        self.files: dict[str, str] = {}
        self.released: set[str] = set()
        self.served = ServedAdapters(
            model_card("tiny", *in_folder),
            self.engine,
            files=self,
            used=lambda: self.used,
            clock=lambda: self.now,
        )

    def read(self, path: str, name: str, version: str) -> AdapterRecord:
        version = self.files.get(path, "")
        reason = None if version else "adapter_config.json is missing"
        return AdapterRecord(name=name, path=Path(path), version=version, reason=reason)

    def release(self, versions: Iterable[str]) -> None:
        self.released |= set(versions)

    def put(self, version: str) -> tuple[str, str]:
        """A folder whose files have this version, and the version."""
        self.files[f"/{version}"] = version
        return f"/{version}", version

    @property
    def card(self) -> ModelCard:
        return self.served.card

    @property
    def meanings(self) -> dict[str, str]:
        return {card.name: card.version for card in self.card.adapters if card.is_usable}

    @property
    def staged(self) -> set[tuple[str, str]]:
        return {(card.name, card.version) for card in self.card.staged}

    async def publish(self, revision: int, *withdrawn: str, **names: str | tuple[str, str]) -> None:
        """names: version, or version and the one before"""
        found = []
        for name, given in names.items():
            version, *before = (given,) if isinstance(given, str) else given
            previous = (before[0], f"/{before[0]}") if before else None
            found.append(
                PublishedAdapter(base="tiny", name=name, version=version, path=f"/{version}", previous=previous)
            )
        others = PublishedAdapter(base="another", name="x", version="v9", path="/v9")
        hidden = tuple(("tiny", name) for name in withdrawn)
        await self.served.apply(AdapterSet(revision=revision, adapters=(*found, others), withdrawn=hidden))


def ref(name: str, version: str) -> ModelRef:
    return ModelRef(base="tiny", adapter=name, version=version)


async def test_what_is_published_hides_the_folder_and_what_is_withdrawn_is_gone() -> None:
    shelf = Shelf(adapter_card("sql", "old"), adapter_card("law", "l1"), adapter_card("art", "a1"))
    assert shelf.meanings == {"sql": "old", "law": "l1", "art": "a1"}
    shelf.put("new")
    await shelf.publish(3, "law", sql="new")
    assert shelf.meanings == {"sql": "new", "art": "a1"}
    assert shelf.card.adapters_revision == 3
    assert shelf.card.has(ref("sql", "new"))
    assert shelf.card.has(ref("sql", "old")), "requests that were given it before are on their way"
    assert not shelf.card.has(ref("law", "l1")), "nothing of what is withdrawn can be asked for"
    assert shelf.engine.calls == [("bind", "new")]
    await shelf.publish(4)
    assert shelf.meanings == {"sql": "old", "law": "l1", "art": "a1"}, "the folder rules what nobody published"


async def test_files_of_a_version_that_is_refused_or_forgotten_are_not_held_any_more() -> None:
    shelf = Shelf()
    with pytest.raises(AdapterUnusable):
        await shelf.served.stage("sql", "/missing", "missing")
    assert shelf.released == {"missing"}
    shelf.put("v1")
    await shelf.publish(1, sql="v1")
    assert "v1" not in shelf.released, "it may be read again"
    shelf.now += 2 * KEPT_S
    await shelf.publish(2, "sql")
    assert shelf.released == {"missing", "v1"}


async def test_an_older_set_changes_nothing_and_the_same_one_tries_again_what_could_not_be_served() -> None:
    shelf = Shelf()
    await shelf.publish(5, sql="new")
    [card] = shelf.card.adapters
    assert (card.name, card.version, card.is_usable) == ("sql", "new", False)
    assert "adapter_config.json is missing" in str(card.reason)
    shelf.put("new")
    await shelf.publish(4, sql="older")
    assert not shelf.meanings
    await shelf.publish(5, sql="new")
    assert shelf.meanings == {"sql": "new"}
    calls = [*shelf.engine.calls]
    await shelf.publish(5, sql="new")
    assert shelf.engine.calls == calls


async def test_the_version_before_stays_at_hand_and_one_that_nobody_needs_is_dropped() -> None:
    shelf = Shelf()
    for version in ("v1", "v2", "v3"):
        shelf.put(version)
    await shelf.publish(1, sql="v1")
    await shelf.publish(2, sql=("v2", "v1"))
    shelf.now += 2 * KEPT_S
    await shelf.publish(3, sql=("v3", "v2"))
    assert (shelf.meanings, shelf.staged) == ({"sql": "v3"}, {("sql", "v2")})
    assert shelf.engine.dropped == {"v1"}
    assert not shelf.card.has(ref("sql", "v1"))
    await shelf.publish(4, sql=("v2", "v3"))
    assert (shelf.meanings, shelf.staged) == ({"sql": "v2"}, {("sql", "v3")})
    assert shelf.engine.calls == [("bind", "v1"), ("bind", "v2"), ("bind", "v3")], "a rollback reads nothing"


async def test_a_canary_is_at_hand_under_its_share_and_stays_for_a_while_behind_its_end() -> None:
    shelf = Shelf()
    for version in ("v1", "v2", "v3"):
        shelf.put(version)
    adapter = PublishedAdapter(base="tiny", name="sql", version="v2", path="/v2", previous=("v1", "/v1"))
    tried = replace(adapter, canary=Canary(version="v3", path="/v3", share=0.25))
    await shelf.served.apply(AdapterSet(revision=1, adapters=(tried,)))
    [card] = shelf.card.adapters
    assert (card.version, card.canary) == ("v2", ("v3", 0.25))
    assert shelf.staged == {("sql", "v1"), ("sql", "v3")}
    shelf.now = 2 * KEPT_S
    await shelf.served.apply(AdapterSet(revision=2, adapters=(adapter,)))
    assert shelf.card.has(ref("sql", "v3")), "requests that were given it are on their way"
    shelf.now += 2 * KEPT_S
    await shelf.served.apply(AdapterSet(revision=3, adapters=(adapter,)))
    assert shelf.staged == {("sql", "v1")}
    assert shelf.engine.dropped == {"v3"}


async def test_a_version_whose_folder_was_overwritten_leaves_memory_last() -> None:
    shelf = Shelf()
    path, _ = shelf.put("v1")
    first, second = (PublishedAdapter(base="tiny", name="sql", version=each, path=path) for each in ("v1", "v2"))
    await shelf.served.apply(AdapterSet(revision=1, adapters=(first,)))
    shelf.files[path] = "v2"
    await shelf.served.stage("sql", path, "v2")
    await shelf.served.apply(AdapterSet(revision=2, adapters=(replace(second, previous=("v1", path)),)))
    assert (shelf.meanings, shelf.staged, shelf.engine.kept) == ({"sql": "v2"}, {("sql", "v1")}, {"v1"})
    shelf.put("v3")
    await shelf.publish(3, sql=("v3", "v2"))
    assert not shelf.engine.kept


async def test_a_version_that_open_requests_use_is_not_dropped() -> None:
    shelf = Shelf()
    for version in ("v1", "v2"):
        shelf.put(version)
    await shelf.publish(1, sql="v1")
    await shelf.publish(2, sql="v2")
    shelf.now += 2 * KEPT_S
    shelf.used = frozenset({"v1"})
    await shelf.publish(3, sql="v2")
    assert shelf.card.has(ref("sql", "v1"))
    assert not shelf.engine.dropped
    shelf.used = frozenset()
    await shelf.publish(4, sql="v2")
    assert shelf.engine.dropped == {"v1"}


async def test_what_is_staged_is_meant_by_nothing_until_a_set_says_so() -> None:
    shelf = Shelf(adapter_card("sql", "old"))
    path, version = shelf.put("new")
    card = await shelf.served.stage("sql", path, version)
    assert (card.name, card.version, card.root) == ("sql", "new", "/new")
    assert (shelf.meanings, shelf.staged) == ({"sql": "old"}, set())
    await shelf.served.stage("sql", path, version)
    assert shelf.engine.calls == [("stage", "new")], "what is in memory costs nothing"
    await shelf.publish(1)
    assert not shelf.engine.dropped, "a publication is under way"
    await shelf.publish(2, sql="new")
    assert shelf.meanings == {"sql": "new"}
    assert shelf.engine.calls == [("stage", "new")]


async def test_a_refused_adapter_leaves_nothing_behind() -> None:
    shelf = Shelf(adapter_card("sql", "old"))
    shelf.engine.refusals = {"bad": AdapterUnusable("inert"), "late": Overloaded("no slot", None, {"retry_after_s": 5})}
    for version, kind in (("bad", AdapterUnusable), ("late", Overloaded)):
        with pytest.raises(kind):
            await shelf.served.stage("sql", *shelf.put(version))
    with pytest.raises(InvalidRequest, match="changed meanwhile"):
        await shelf.served.stage("sql", shelf.put("one")[0], "another")
    with pytest.raises(AdapterUnusable, match=r"adapter_config\.json is missing"):
        await shelf.served.stage("sql", "/nowhere", "v1")
    await shelf.publish(1)
    assert shelf.meanings == {"sql": "old"}


async def test_one_folder_may_have_two_names() -> None:
    shelf = Shelf()
    shelf.put("v1")
    await shelf.publish(1, sql="v1", query="v1")
    assert shelf.meanings == {"sql": "v1", "query": "v1"}
    assert shelf.engine.calls == [("bind", "v1")]
