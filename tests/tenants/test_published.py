"""What a fleet has published, as a set that changes, in a file and in a store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.core.adapters import AdapterSet, Canary, PublishedAdapter
from serve_app.core.errors import AdapterNotFound, InvalidRequest
from serve_app.tenants import published, tables
from serve_app.tenants.errors import StoreUnavailable
from serve_app.tenants.ledger import LedgerStore
from serve_app.tenants.published import Change, PublishedFile, changed
from serve_app.tenants.published_table import change_published, published_in
from serve_app.tenants.store import TenantStore
from tests.tenants.conftest import BOTH

Kept = tuple[Callable[[], AdapterSet], Callable[[Change], AdapterSet]]
"""How to read a set that is kept, and how to change it."""


def publishing(version: str, name: str = "sql", **said: object) -> Change:
    made = Change(action="publish", base="demo", name=name, version=version, path=f"/a/{version}", by="acme", at=5.0)
    return replace(made, **said)  # type: ignore[arg-type]


def doing(action: published.Action, name: str = "sql", **said: object) -> Change:
    return replace(Change(action=action, base="demo", name=name, by="acme", at=6.0), **said)  # type: ignore[arg-type]


def after(*changes: Change) -> AdapterSet:
    found = AdapterSet()
    for each in changes:
        found = changed(found, each)
    return found


@pytest.fixture(params=["file", *BOTH])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    if request.param == "file":
        file = PublishedFile(tmp_path / "adapters.json")
        yield file.read, file.change
        return
    is_postgresql = request.param == "postgresql"
    url = request.getfixturevalue("postgresql").new_database() if is_postgresql else f"sqlite:///{tmp_path / 'kept.db'}"
    store = TenantStore(url)
    yield lambda: published_in(store), lambda change: change_published(store, change)
    store.close()


def test_a_published_name_means_its_version() -> None:
    found = after(publishing("v1"))
    assert (found.revision, found.find("demo", "sql")) == (
        1,
        PublishedAdapter(base="demo", name="sql", version="v1", path="/a/v1", published_at=5.0, by="acme"),
    )
    assert found.find("other", "sql") is None


def test_what_a_name_means_is_replaced_only_where_that_is_asked_for() -> None:
    first = after(publishing("v1"))
    with pytest.raises(InvalidRequest, match=r"already been loaded.*load_inplace"):
        changed(first, publishing("v2"))
    second = changed(first, publishing("v2", in_place=True))
    found = second.find("demo", "sql")
    assert found is not None
    assert (found.version, found.previous, second.revision) == ("v2", ("v1", "/a/v1"), 2)


def test_a_name_that_is_served_from_a_folder_is_taken_only_in_place_and_can_be_rolled_back_to_it() -> None:
    with pytest.raises(InvalidRequest, match="already been loaded"):
        after(publishing("v1", served=("f0", "/folder")))
    found = after(publishing("v1", served=("f0", "/folder"), in_place=True), doing("roll back"))
    adapter = found.find("demo", "sql")
    assert adapter is not None
    assert (adapter.version, adapter.path, adapter.previous) == ("f0", "/folder", ("v1", "/a/v1"))


def test_the_same_version_again_changes_nothing_and_keeps_the_way_back() -> None:
    before = after(publishing("v1"), publishing("v2", in_place=True))
    assert changed(before, publishing("v2", in_place=True)) is before
    moved = changed(before, publishing("v2", in_place=True, path="/moved")).find("demo", "sql")
    assert moved is not None
    assert (moved.path, moved.previous) == ("/moved", ("v1", "/a/v1"))


def test_rolling_back_twice_goes_forward_again() -> None:
    forward = after(publishing("v1"), publishing("v2", in_place=True))
    back = changed(forward, doing("roll back"))
    assert [each.version for each in back.adapters] == ["v1"]
    assert [each.version for each in changed(back, doing("roll back")).adapters] == ["v2"]


def test_there_is_nothing_to_roll_back_to_behind_the_first_version() -> None:
    with pytest.raises(InvalidRequest, match="has one version only"):
        after(publishing("v1"), doing("roll back"))
    with pytest.raises(AdapterNotFound, match="'demo:sql', which cannot be found"):
        after(doing("roll back"))


def test_a_canary_is_tried_beside_what_the_name_means() -> None:
    found = after(publishing("v1"), publishing("v2", share=0.05)).find("demo", "sql")
    assert found is not None
    assert (found.version, found.previous) == ("v1", None)
    assert found.canary == Canary(version="v2", path="/a/v2", share=0.05, since=5.0, by="acme")
    of_folder = after(publishing("v2", share=0.05, served=("f0", "/folder"))).find("demo", "sql")
    assert of_folder is not None
    assert (of_folder.version, of_folder.path, of_folder.canary) == ("f0", "/folder", found.canary)


def test_a_canary_needs_a_name_that_is_served_in_another_version_and_folder() -> None:
    served = after(publishing("v1"))
    for refused, reason in (
        (publishing("v2", name="law", share=0.05), "a name that is not served yet"),
        (publishing("v1", share=0.05), "the version that the name means already"),
        (publishing("v2", share=0.05, path="/a/v1"), "be another folder"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            changed(served, refused)
    tried = changed(served, publishing("v2", share=0.05))
    with pytest.raises(InvalidRequest, match="Roll it back, or publish in place"):
        changed(tried, publishing("v3", share=0.05))
    again = changed(tried, publishing("v2", share=0.5)).find("demo", "sql")
    assert again is not None
    assert again.canary is not None
    assert again.canary.share == 0.5


def test_a_canary_becomes_what_the_name_means_or_ends() -> None:
    tried = after(publishing("v1"), publishing("v2", share=0.5))
    whole = changed(tried, doing("widen", version="v2", share=1.0, tried=0.5, by="rollout")).find("demo", "sql")
    assert whole is not None
    assert (whole.version, whole.previous, whole.canary, whole.by) == ("v2", ("v1", "/a/v1"), None, "acme")
    back = changed(tried, doing("roll back")).find("demo", "sql")
    assert back is not None
    assert (back.version, back.previous, back.canary) == ("v1", None, None)
    for version, previous in (("v1", None), ("v2", ("v1", "/a/v1")), ("v3", ("v1", "/a/v1"))):
        in_place = changed(tried, publishing(version, in_place=True)).find("demo", "sql")
        assert in_place is not None
        assert (in_place.version, in_place.previous, in_place.canary) == (version, previous, None)
    gone = changed(tried, doing("withdraw"))
    assert gone.adapters == ()
    with pytest.raises(AdapterNotFound):
        changed(gone, doing("widen", version="v2", share=1.0, tried=0.5))


def test_of_two_who_decide_about_a_canary_one_is_heard_and_a_rollback_is_final() -> None:
    tried = after(publishing("v1"), publishing("v2", share=0.05))
    widen = doing("widen", version="v2", share=0.25, tried=0.05)
    widened = changed(tried, widen)
    assert changed(widened, widen) is widened
    back = changed(widened, doing("roll back", version="v2"))
    assert changed(back, doing("widen", version="v2", share=0.5, tried=0.25)) is back
    assert changed(back, doing("roll back", version="v2")) is back
    other = changed(back, publishing("v3", share=0.05))
    assert changed(other, doing("roll back", version="v2")) is other


def test_a_withdrawn_name_means_nothing_until_it_is_published_again() -> None:
    gone = after(publishing("v1"), doing("withdraw"))
    assert (gone.adapters, gone.withdrawn, gone.withdrawn_of("demo")) == ((), (("demo", "sql"),), {"sql"})
    with pytest.raises(AdapterNotFound, match="cannot be found"):
        changed(gone, doing("withdraw"))
    again = changed(gone, publishing("v3"))
    assert (again.withdrawn, again.revision) == ((), 3)


def test_an_adapter_of_a_folder_can_be_withdrawn() -> None:
    assert after(doing("withdraw", served=("f0", "/folder"))).withdrawn == (("demo", "sql"),)


def test_a_revision_is_higher_than_any_that_a_replica_has_applied() -> None:
    assert after(publishing("v1", seen=41)).revision == 42


def test_names_are_bounded() -> None:
    few = AdapterSet(
        adapters=tuple(
            PublishedAdapter(base="demo", name=f"n{i}", version="v", path="/") for i in range(published.MAX_PUBLISHED)
        )
    )
    with pytest.raises(InvalidRequest, match="withdraw some"):
        changed(few, publishing("v1"))
    many = AdapterSet(withdrawn=tuple(("demo", f"n{i}") for i in range(published.MAX_WITHDRAWN)))
    assert len(changed(many, doing("withdraw", served=("f", "/f"))).withdrawn) == published.MAX_WITHDRAWN


def test_what_is_kept_is_what_was_changed(kept: Kept) -> None:
    read, change = kept
    assert read() == AdapterSet()
    steps = [
        publishing("v1"),
        publishing("v2", in_place=True),
        publishing("w1", name="law", by="other"),
        doing("withdraw"),
        doing("withdraw", name="chat", served=("f0", "/f"), at=7.0),
        publishing("v3"),
        publishing("w2", name="law", in_place=True),
        doing("roll back", name="law"),
        publishing("w9", name="law", share=0.05),
        doing("widen", name="law", version="w9", share=0.25, tried=0.05, by="rollout", at=8.0),
        publishing("v4", share=0.5),
        doing("widen", version="v4", share=1.0, tried=0.5, reason="no worse"),
        doing("roll back", name="law", version="w9", reason="it fails"),
    ]
    expected = AdapterSet()
    for step in steps:
        expected = changed(expected, step)
        assert change(step) == expected
        assert read() == expected


def test_a_change_that_is_refused_changes_nothing(kept: Kept) -> None:
    read, change = kept
    before = change(publishing("v1"))
    with pytest.raises(InvalidRequest):
        change(publishing("v2"))
    assert read() == before


def test_changes_at_once_are_all_kept(kept: Kept) -> None:
    read, change = kept
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: change(publishing(f"v{number}", name=f"n{number}")), range(24)))
    assert (len(read().adapters), read().revision) == (24, 24)


def test_every_change_in_a_store_has_an_event_and_grows_its_version(url: str) -> None:
    store = TenantStore(url)
    before = store.version
    change_published(store, publishing("v1", actor="key-1"))
    change_published(store, doing("withdraw", actor="key-2"))
    told = [(each.actor, each.action, each.subject) for each in store.events()]
    assert told == [("key-1", "publish adapter", "demo:sql"), ("key-2", "withdraw adapter", "demo:sql")]
    assert store.version == before + 2
    store.close()


def test_the_events_of_a_canary_have_its_share_and_the_reason(url: str) -> None:
    store = TenantStore(url)
    change_published(store, publishing("v1"))
    change_published(store, publishing("v2", share=0.05))
    change_published(store, doing("widen", version="v2", share=0.25, tried=0.05, by="rollout", reason="no worse"))
    change_published(store, doing("roll back", version="v2", by="rollout", reason="it fails"))
    told = [(each.actor, each.action, each.details.get("share"), each.details.get("reason")) for each in store.events()]
    assert told[1:] == [
        ("acme", "publish adapter", 0.05, None),
        ("rollout", "widen adapter", 0.25, "no worse"),
        ("rollout", "roll back adapter", None, "it fails"),
    ]
    store.close()


def test_a_file_without_canaries_is_one_that_earlier_versions_read(tmp_path: Path) -> None:
    file = PublishedFile(tmp_path / "adapters.json")
    expected = file.change(publishing("v1"))
    [written] = json.loads((tmp_path / "adapters.json").read_text())["adapters"]
    assert set(written) == {"base", "name", "version", "path", "previous", "published_at", "by"}
    assert file.read() == expected
    assert file.change(publishing("v2", share=0.05)) == file.read()


def test_a_canary_that_is_held_stays_and_of_several_routers_one_event_tells_it_for_each_share(url: str) -> None:
    store = TenantStore(url)
    change_published(store, publishing("v1"))
    before = change_published(store, publishing("v2", share=0.05, at=10.0))
    held = doing("hold", version="v2", tried=0.05, by="rollout", reason="3 requests", at=20.0)
    assert [change_published(store, held) for _ in range(2)] == [before, before]
    change_published(store, doing("widen", version="v2", share=0.25, tried=0.05, at=30.0))
    change_published(store, held)  # of a router that has not heard
    change_published(store, replace(held, tried=0.25, at=40.0))
    told = [each.action.removesuffix(" adapter") for each in store.events()]
    assert told == ["publish", "publish", "hold", "widen", "hold"]
    assert store.events()[2].details["reason"] == "3 requests"
    store.close()


def test_a_store_that_an_earlier_version_made_gets_its_tables_when_the_ledger_is_opened(url: str) -> None:
    old = TenantStore(url)
    for table in tables.OF_ADAPTERS:
        table.drop(old.engine)
    LedgerStore(old.engine)
    assert published_in(old) == AdapterSet()
    assert change_published(old, publishing("v1")).revision == 1
    old.close()


NO_ADAPTER = b'{"form": 1, "revision": 1, "adapters": [{}], "withdrawn": []}'


@pytest.mark.parametrize("written", [b"", b"[]", b"{", b'{"form": 2}', NO_ADAPTER])
def test_a_damaged_file_is_refused_by_name_and_stays(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "adapters.json"
    path.write_bytes(written)
    for ask in (PublishedFile(path).read, lambda: PublishedFile(path).change(publishing("v1"))):
        with pytest.raises(StoreUnavailable, match=r"adapters\.json.* cannot be read"):
            ask()
    assert path.read_bytes() == written


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        PublishedFile(tmp_path / "missing" / "adapters.json").change(publishing("v1"))


def test_the_mark_of_a_file_changes_with_it(tmp_path: Path) -> None:
    file = PublishedFile(tmp_path / "adapters.json")
    marks = [file.mark]
    for number in range(3):
        file.change(publishing(f"v{number}", in_place=True))
        marks.append(file.mark)
    assert len(set(marks)) == 4


WRITER = """
import sys
from pathlib import Path
from serve_app.tenants.published import Change, PublishedFile
file = PublishedFile(Path(sys.argv[1]))
print("begins", flush=True)
for number in range(1_000_000):
    change = Change(action="publish", base="demo", name="sql", version=f"v{number}", path="/a", in_place=True)
    file.change(change)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "adapters.json"
    revision = 0
    for _ in range(8):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        while PublishedFile(path).read().revision < revision + 20:
            assert writer.poll() is None
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        found = PublishedFile(path).read()
        assert found.revision >= revision + 20
        assert [each.name for each in found.adapters] == ["sql"]
        revision = PublishedFile(path).change(publishing("w", name="law", in_place=True)).revision
        PublishedFile(path).change(doing("withdraw", name="law"))
        revision += 1
    assert json.loads(path.read_text())["form"] == published.FORM
