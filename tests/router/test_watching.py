"""Folders that are published by themselves: when, how often, and what they never undo."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from serve_app.catalog.adapters import read_version
from serve_app.core.adapters import AdapterSet, PublishedAdapter
from serve_app.core.errors import InvalidRequest, Overloaded, Unavailable
from serve_app.router.fleet import Fleet
from serve_app.router.published_sources import FileSource
from serve_app.router.publishing import Publisher, Publishing
from serve_app.router.watching import Watching
from serve_app.tenants.published import Change, PublishedFile
from tests.catalog.zoo import SOUND_CONFIG, write_adapter
from tests.fakes import FakeBackend, model_card, replica_card

OPERATOR = Publisher()
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def weights(number: int) -> bytes:
    shape = (4, 8)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    return save(
        {name.format("A"): np.full(shape, number, "float32"), name.format("B"): np.ones(shape[::-1], "float32")}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ARouter:
    """What of a router publishes."""

    fleet: Fleet
    source: FileSource
    publishing: Publishing
    watching: Watching


@dataclass(slots=True)
class Watched:
    """Two replicas of `tiny`, a watched folder, and routers that share one file of what is published."""

    root: Path
    elsewhere: Path
    file: PublishedFile
    backends: list[FakeBackend] = field(default_factory=list)
    routers: list[ARouter] = field(default_factory=list)

    def start_router(self) -> None:
        fleet, source = Fleet(f"router-{len(self.routers)}"), FileSource(self.file)
        publishing = Publishing(fleet, source, roots=[str(self.elsewhere)], clock=lambda: 7.0)
        watching = Watching(fleet, publishing)
        self.routers.append(ARouter(fleet=fleet, source=source, publishing=publishing, watching=watching))

    @property
    def publishing(self) -> Publishing:
        return self.routers[0].publishing

    async def look(self, times: int = 2) -> None:
        """Every router greets the replicas, hears what is published, and looks into the folder, so many times."""
        for _ in range(times):
            for router in self.routers:
                await router.source.look()
                for each in self.backends:
                    router.publishing.put(each.card, each)
                await router.watching.look()

    def write(self, name: str, number: int = 1, *, root: Path | None = None) -> Path:
        folder = (root or self.root) / name
        shutil.rmtree(folder, ignore_errors=True)
        return write_adapter(folder, weights=weights(number))

    @property
    def published(self) -> dict[str, str]:
        return {each.name: each.version for each in self.file.read().adapters}

    def found(self, name: str) -> PublishedAdapter:
        found = self.file.read().find("tiny", name)
        assert found is not None
        return found


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    root, elsewhere = tmp_path / "adapters", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    made = Watched(root=root, elsewhere=elsewhere, file=PublishedFile(tmp_path / "published.json"))
    for number in range(2):
        card = replace(model_card("tiny"), adapters_root=str(root), watches_adapters=True)
        made.backends.append(FakeBackend(replica_card(f"r{number}", card)))
    made.start_router()
    await made.look()
    yield made
    for router in made.routers:
        await router.fleet.close()


def version_of(folder: Path) -> str:
    return read_version(folder, root=folder.parent)


async def test_a_new_folder_is_published_and_a_changed_one_takes_its_place(watched: Watched) -> None:
    first = version_of(watched.write("sql", 1))
    await watched.look(1)
    assert watched.published == {}, "one look does not tell whether it is still being copied"
    await watched.look(1)
    assert watched.published == {"sql": first}
    assert {each.card.model.adapters_revision for each in watched.backends} == {1}
    assert watched.found("sql").by == "folder"
    second = version_of(watched.write("sql", 2))
    await watched.look()
    assert watched.published == {"sql": second}
    assert watched.found("sql").previous == (first, str(watched.root / "sql"))
    revision = watched.file.read().revision
    await watched.look(3)
    assert watched.file.read().revision == revision


async def test_a_copy_in_progress_is_not_published(watched: Watched, tmp_path: Path) -> None:
    whole = watched.write("whole", 1, root=tmp_path)
    folder = watched.root / "sql"
    folder.mkdir()
    await watched.look()
    shutil.copy(whole / CONFIG, folder)
    await watched.look()
    content = (whole / WEIGHTS).read_bytes()
    for size in (4, len(content) // 2, len(content) - 1):
        (folder / WEIGHTS).write_bytes(content[:size])
        await watched.look(3)
        assert watched.published == {}
    (folder / WEIGHTS).write_bytes(content)
    await watched.look()
    assert watched.published == {"sql": version_of(whole)}
    assert watched.publishing.refused == {}


async def test_a_folder_that_is_renamed_in_or_a_link_that_is_turned_is_published(watched: Watched) -> None:
    made = watched.write("made", 1, root=watched.root.parent)
    os.rename(made, watched.root / "sql")
    versions = [watched.write(name, number, root=watched.root / ".versions") for number, name in enumerate("ab")]
    (watched.root / "law").symlink_to(versions[0])
    await watched.look()
    assert watched.published == {"sql": version_of(watched.root / "sql"), "law": version_of(versions[0])}
    turned = watched.root / ".turned"
    turned.symlink_to(versions[1])
    os.replace(turned, watched.root / "law")
    await watched.look()
    assert watched.published["law"] == version_of(versions[1])
    assert watched.found("law").previous == (version_of(versions[0]), str(versions[0])), "its files are there"
    await watched.publishing.roll_back("tiny:law", OPERATOR)
    assert watched.published["law"] == version_of(versions[0])


async def test_several_routers_make_one_change_of_it(watched: Watched) -> None:
    watched.start_router()
    watched.start_router()
    await watched.look()
    for name in ("sql", "law"):
        watched.write(name)
    for _ in range(3):
        await asyncio.gather(*(router.watching.look() for router in watched.routers))
        await watched.look(1)
    assert watched.published.keys() == {"sql", "law"}
    assert watched.file.read().revision == 2


async def test_a_late_router_does_not_undo_what_came_meanwhile(watched: Watched) -> None:
    folder = watched.write("sql", 1)
    await watched.look()
    revision = watched.file.read().revision
    watched.write("sql", 2)
    await watched.look()
    await watched.publishing.roll_back("tiny:sql", OPERATOR)
    late = Change(action="publish", base="tiny", name="sql", version="2" * 32, in_place=True, revision=revision)
    with pytest.raises(Unavailable, match="meanwhile"):
        watched.file.change(replace(late, path=str(folder)))


async def test_what_was_rolled_back_or_withdrawn_stays_so_until_the_files_change(watched: Watched) -> None:
    first = version_of(watched.write("sql", 1))
    watched.write("law", 1)
    await watched.look()
    watched.write("sql", 2)
    await watched.look()
    await watched.publishing.roll_back("tiny:sql", OPERATOR)
    await watched.publishing.withdraw("tiny:law", OPERATOR)
    watched.start_router()  # it has seen none of this
    await watched.look(3)
    assert watched.published == {"sql": first}
    third, again = version_of(watched.write("sql", 3)), version_of(watched.write("law", 2))
    await watched.look()
    assert watched.published == {"sql": third, "law": again}


async def test_the_version_before_is_published_again_where_its_files_come_back(watched: Watched) -> None:
    first = version_of(watched.write("sql", 1))
    await watched.look()
    watched.write("sql", 2)
    await watched.look()
    watched.write("sql", 1)
    await watched.look()
    assert watched.published == {"sql": first}


async def test_a_folder_that_is_gone_withdraws_nothing(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    version = version_of(watched.write("sql", 1))
    await watched.look()
    shutil.rmtree(watched.root / "sql")
    await watched.look()
    assert watched.published == {"sql": version}
    watched.root.rmdir()
    await watched.look(3)
    assert watched.published == {"sql": version}
    assert len([each for each in caplog.records if "cannot be read" in each.message]) == 1


async def test_a_name_that_was_published_from_elsewhere_keeps_its_meaning(watched: Watched) -> None:
    own = watched.write("sql-7", 7, root=watched.elsewhere)
    await watched.publishing.publish("tiny:sql", str(own), OPERATOR)
    watched.write("sql", 1)
    await watched.look()
    assert watched.published == {"sql": version_of(own)}
    assert f"published from {own}" in str(watched.publishing.entry("tiny", "sql").refused)


async def test_a_refused_folder_is_told_once_and_not_tried_before_it_changes(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    refusing = watched.backends[1]
    refusing.stage_refusal = InvalidRequest("its outputs overflow", "lora_path")
    watched.write("sql", 1)
    await watched.look()
    refusing.stage_refusal = None
    await watched.look(3)
    assert watched.published == {}
    [listed] = watched.publishing.listed()
    assert (listed.id, listed.version, listed.refused) == ("tiny:sql", "", "its outputs overflow")
    assert len([each for each in caplog.records if "is not published as tiny:sql" in each.message]) == 1
    watched.write("sql", 2)
    await watched.look()
    assert watched.published.keys() == {"sql"}
    assert watched.publishing.entry("tiny", "sql").refused is None


async def test_a_replica_without_time_says_nothing_of_the_files(watched: Watched) -> None:
    watched.backends[0].stage_refusal = Overloaded("all slots are in use", None, {"retry_after_s": 1})
    watched.write("sql", 1)
    await watched.look()
    assert watched.published == {}
    assert watched.publishing.refused == {}
    watched.backends[0].stage_refusal = None
    await watched.look(1)
    assert watched.published.keys() == {"sql"}


async def test_what_replicas_found_at_start_is_not_published_again(watched: Watched) -> None:
    version = version_of(watched.write("sql", 1))
    for each in watched.backends:
        card = replace(model_card("tiny"), adapters_root=str(watched.root), watches_adapters=True)
        found = await each.stage_adapter("sql", str(watched.root / "sql"), version)
        each.card = replace(each.card, model=replace(card, adapters=(found,)))
    await watched.look()
    assert watched.file.read() == AdapterSet()
    second = version_of(watched.write("sql", 2))
    await watched.look()
    assert watched.published == {"sql": second}
    assert watched.found("sql").previous == (version, str(watched.root / "sql"))


async def test_what_is_no_adapter_is_told_with_the_way_out(watched: Watched) -> None:
    folder = watched.root / "pickled"
    folder.mkdir()
    (folder / CONFIG).write_text("{}")
    (folder / "adapter_model.bin").write_bytes(b"x")
    (watched.root / "README.md").write_text("a file beside the folders")
    (watched.root / ".hidden").mkdir()
    write_adapter(watched.root / "of mixes", config=SOUND_CONFIG, weights=weights(1))
    write_adapter(watched.root / os.fsdecode(b"\xff\n"), config=SOUND_CONFIG, weights=weights(1))
    (watched.root / "circle").symlink_to(watched.root / "circle")
    await watched.look()
    assert watched.published == {}
    refused = {name: reason for (_, name), reason in watched.publishing.refused.items()}
    assert refused.keys() == {"pickled", "of mixes", "circle", r"\udcff\n"}
    assert json.loads(json.dumps([asdict(each) for each in watched.publishing.listed()], ensure_ascii=False).encode())
    assert "a pickle" in refused["pickled"]
    assert "is not allowed" in refused["of mixes"]
    shutil.rmtree(folder)
    await watched.look()
    assert {name for _, name in watched.publishing.refused} == refused.keys() - {"pickled"}
