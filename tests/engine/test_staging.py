"""What is taken in while an engine runs is bounded, and refused with the reason and the way out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.catalog.adapters import read_published, read_records
from serve_app.core.cards import AdapterRecord
from serve_app.core.errors import AdapterUnusable
from serve_app.engine.decoder.loading import load_model
from serve_app.engine.driver import ReplicaEngine
from tests.engine.adapter_files import save_adapter
from tests.engine.conftest import DEMO
from tests.engine.harness import config

pytestmark = pytest.mark.slow

SECONDS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of one configuration, `a` and `b`, and a wide one, whose configuration PEFT alone can match."""
    out, module = tmp_path_factory.mktemp("adapters"), load_model(config(DEMO)).module
    for seed, name in enumerate("ab"):
        save_adapter(out / name, module, rank=8, seed=seed)
    wide = save_adapter(out / "wide", module, rank=64, seed=3) / "adapter_config.json"
    wide.write_text(json.dumps(json.loads(wide.read_text()) | {"exclude_modules": ["nothing_of_this_name"]}))
    return out


def record(folder: Path, name: str) -> AdapterRecord:
    return read_published(folder / name, name)


@contextmanager
def started(*found: AdapterRecord, **changes: Any) -> Iterator[ReplicaEngine]:
    """An engine in its thread, with these adapters at start."""
    engine, _ = ReplicaEngine.load_model(config(DEMO, **changes), found)
    engine.start(lambda deltas, load: None)
    try:
        yield engine
    finally:
        engine.close()


def test_a_configuration_that_was_there_at_start_is_not_matched_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.engine.lora.sandboxed_matching.MATCHING_S", 0.001)  # no process could
    with started(record(folder, "a")) as engine:
        card = engine.adapters.stage(record(folder, "b")).result(SECONDS)
        assert (card.name, card.rank, card.is_usable) == ("b", 8, True)
        assert engine.adapters.is_resident(card.version)
        assert engine.residency.num_bytes == engine.core.bank.bytes_of(card.version)
        with pytest.raises(AdapterUnusable, match="cannot be matched"):
            engine.adapters.stage(record(folder, "wide")).result(SECONDS)


def test_what_takes_more_than_all_bytes_is_refused_at_start_and_later(folder: Path) -> None:
    with started(*read_records(folder)) as engine:
        most = engine.core.bank.bytes_of(record(folder, "a").version)
    with started(*read_records(folder), adapter_bytes=most) as engine:
        assert {card.name: card.is_usable for card in engine.card.adapters} == {"a": True, "b": True, "wide": False}
        reason = next(card.reason for card in engine.card.adapters if not card.is_usable)
        assert f"`adapter_bytes` is {most}" in str(reason)
        with pytest.raises(AdapterUnusable, match="adapter_bytes"):
            engine.adapters.stage(record(folder, "wide")).result(SECONDS)
        for name in "ab":
            engine.adapters.stage(record(folder, name)).result(SECONDS)
            assert engine.residency.num_bytes <= most
        assert engine.residency.versions == (record(folder, "b").version,)


def test_a_model_without_slots_and_a_file_of_strange_tensors_are_refused(folder: Path) -> None:
    with started(max_adapters=0) as engine, pytest.raises(AdapterUnusable, match="`max_adapters` is 0"):
        engine.adapters.stage(record(folder, "a")).result(SECONDS)
    many = replace(record(folder, "a"), tensors={f"t{number}": (1,) for number in range(10_000)})
    with started(record(folder, "a")) as engine, pytest.raises(AdapterUnusable, match="10000 tensors"):
        engine.adapters.stage(many).result(SECONDS)


def test_what_is_refused_is_not_known_and_what_is_dropped_gives_its_slot_back(folder: Path, tmp_path: Path) -> None:
    large = save_adapter(tmp_path / "large", load_model(config(DEMO)).module, rank=8, down=1e19, up=1e19)
    with started(record(folder, "a")) as engine:
        refused, good = read_published(large, "large"), record(folder, "b")
        with pytest.raises(AdapterUnusable, match=r'^Adapter "large" cannot be served: its values are too large'):
            engine.adapters.stage(refused).result(SECONDS)
        engine.adapters.stage(good).result(SECONDS)
        assert engine.adapters.drop(frozenset({good.version})).result(SECONDS) == {good.version}
        assert engine.residency.versions == ()
        assert not engine.core.bank.knows(refused.version)
        assert not engine.core.bank.knows(good.version)
