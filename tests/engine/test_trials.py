"""Law: an adapter that comes while the engine runs is computed like one that was there at start, or leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.core.delta import FinishReason
from serve_app.core.errors import Overloaded
from serve_app.engine.decoder.loading import load_model
from serve_app.engine.engine import Engine
from serve_app.engine.lora.adapter import Adapter
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.engine.lora.modules import BankedModule
from serve_app.engine.lora.trials import MOST_WAIT_S
from tests.engine.adapter_files import load_adapter, save_adapter
from tests.engine.conftest import DEMO, DEMO_ADAPTERS
from tests.engine.harness import Outcome, collect, complete, config, drain, make_engine, request, sequences
from tests.engine.test_adapters import train_nothing
from tests.families.making import save_model

pytestmark = pytest.mark.slow

PROMPT = [7, 30, 200, 31, 5, 90, 14, 66]
OTHER = [9, 4, 101, 77]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine(config(DEMO, max_adapters=2))
    yield made
    made.close()


def module_of(folder: Path) -> Any:
    return load_model(config(folder)).module


def try_out(engine: Engine, folder: Path, version: str) -> Future[None]:
    """Have an engine take an adapter in, as `Staging` does; the trial is computed in one of the next steps."""
    adapter = load_adapter(folder, version=version, model=engine.model.module)
    return begin(engine, adapter)


def begin(engine: Engine, adapter: Adapter) -> Future[None]:
    weights, done = engine.bank.read(adapter), Future[None]()
    engine.admit(adapter)
    engine.try_adapter(adapter.version, weights, done)
    return done


def asked(name: str, adapter: str | None = None, **changes: Any) -> Any:
    return request(name, adapter=adapter, **changes)


def tokens(outcomes: dict[tuple[str, int], Outcome]) -> dict[str, list[int]]:
    return {name: outcome.token_ids for (name, _), outcome in outcomes.items()}


@pytest.mark.law("Adapters")
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_one_that_comes_later_is_computed_as_if_it_had_been_there(
    name: str, random_models: Path, tmp_path: Path
) -> None:
    base, module = random_models / name, module_of(random_models / name)
    few = "c_proj" if name == "gpt2" else "down_proj"
    folders = {
        "narrow": save_adapter(tmp_path / "narrow", module, rank=4, seed=1, targets=(few,)),
        "wide": save_adapter(tmp_path / "wide", module, rank=40, seed=2),
        "dora": save_adapter(tmp_path / "dora", module, rank=8, seed=3, use_dora=True),
        "head": save_adapter(tmp_path / "head", module, rank=8, seed=4, targets=("lm_head",)),
    }
    requests = [(asked(each, each), PROMPT) for each in folders] + [(asked("base"), PROMPT)]
    expected = tokens(complete(make_engine(config(base), folders), requests))
    assert len({tuple(each) for each in expected.values()}) == len(expected), "some say the same"
    later = make_engine(config(base), {"narrow": folders["narrow"]})
    later.add(sequences(later, asked("running", max_tokens=40), OTHER))
    before: dict[tuple[str, int], Outcome] = {}
    collect(before, later.step())
    trials = [try_out(later, folder, each) for each, folder in folders.items() if each != "narrow"]
    for one, prompt in requests:
        later.add(sequences(later, one, prompt))
    ours = drain(later)
    assert [trial.exception(0) for trial in trials] == [None] * 3
    assert {key: found for key, found in tokens(ours).items() if key != "running"} == expected
    [(_, running)] = [each for each in ours.items() if each[0][0] == "running"]
    alone = complete(make_engine(config(base)), [(asked("running", max_tokens=40), OTHER)])
    assert before["running", 0].token_ids + running.token_ids == alone["running", 0].token_ids


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_experts_are_wrapped_when_the_first_adapter_of_them_comes(tmp_path: Path) -> None:
    base = tmp_path / "mixtral"
    save_model("mixtral", {}, base)
    experts = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    folder = train_nothing(base, tmp_path / "experts", 3, **experts)
    expected = complete(make_engine(config(base), {"a": folder}), [(asked("r", "a"), PROMPT)])
    later = make_engine(config(base))
    assert not any(isinstance(each, BankedModule) for each in later.model.module.modules())
    trial = try_out(later, folder, "a")
    assert tokens(complete(later, [(asked("r", "a"), PROMPT)])) == tokens(expected)
    assert trial.exception(0) is None
    assert any(isinstance(each, BankedModule) for each in later.model.module.modules())


def test_steps_go_on_while_an_adapter_waits_for_its_trial_and_after_a_refusal(engine: Engine, tmp_path: Path) -> None:
    module = module_of(DEMO)
    [alone] = complete(engine, [(asked("alone", max_tokens=30), PROMPT)]).values()
    engine.add(sequences(engine, asked("running", max_tokens=30), PROMPT))
    bad = {
        "large": save_adapter(tmp_path / "large", module, down=1e19, up=1e19, targets=("q_proj",)),
        "good": save_adapter(tmp_path / "good", module, seed=5),
    }
    trials = {name: try_out(engine, folder, name) for name, folder in bad.items()}
    [running] = drain(engine).values()
    assert running.token_ids == alone.token_ids
    assert "too large" in str(trials["large"].exception(0))
    assert trials["good"].exception(0) is None
    engine.drop_adapters(frozenset({"large"}))
    assert engine.residency.versions == ("good",)
    assert not engine.bank.knows("large")
    engine.check_integrity()


def test_an_adapter_that_changes_nothing_in_the_model_is_refused(engine: Engine, tmp_path: Path) -> None:
    tiny = save_adapter(tmp_path / "tiny", module_of(DEMO), down=1e-30, up=1e-30)
    trial = try_out(engine, tiny, "tiny")
    drain(engine)
    assert str(trial.exception(0)).startswith("inert: ")


@pytest.mark.parametrize("spoil", ["down", "up"])
def test_numbers_that_are_not_those_that_were_read_are_found(engine: Engine, tmp_path: Path, spoil: str) -> None:
    adapter = load_adapter(save_adapter(tmp_path / "a", module_of(DEMO)), version="a", model=engine.model.module)
    done = begin(engine, adapter)  # without a thread of its own it is in its slot by now
    [shelf] = engine.bank._shelves.values()
    name = next(name for name in shelf.stacks if name.endswith("layers.1.mlp.up_proj"))
    getattr(shelf.stacks[name], spoil).mul_(1.2)
    drain(engine)
    assert isinstance(done.exception(0), AdapterRefused)
    assert "not computed as scale·B·A" in str(done.exception(0))
    assert "layers.1.mlp.up_proj" in str(done.exception(0))


def test_a_trial_takes_the_first_slot_that_is_free_or_gives_up_in_time(engine: Engine) -> None:
    now = 0.0
    engine._trials._clock = lambda: now
    names = sorted(folder.parent.name for folder in DEMO_ADAPTERS.glob("*/adapter_config.json"))
    for name in names[:3]:
        engine.admit(load_adapter(DEMO_ADAPTERS / name, version=name, model=engine.model.module))
    for name in names[:2]:
        engine.add(sequences(engine, asked(name, name, max_tokens=200), PROMPT))
    engine.step()
    adapter = load_adapter(DEMO_ADAPTERS / names[0], version="third", model=engine.model.module)
    first = begin(engine, adapter)
    engine.step()
    assert not first.done()
    now += MOST_WAIT_S + 1
    engine.step()
    assert isinstance(first.exception(0), Overloaded)
    assert engine.load.num_running == 2
    second = begin(engine, adapter)
    engine.add(sequences(engine, asked("late", names[2], max_tokens=4), PROMPT))
    outcomes = drain(engine)
    assert second.exception(0) is None
    assert outcomes["late", 0].deltas[-1].error is None


def test_resident_adapters_keep_to_their_bytes_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    module = module_of(DEMO)
    folders = {f"a{seed}": save_adapter(tmp_path / f"a{seed}", module, rank=8, seed=seed) for seed in range(4)}
    size = make_engine(config(DEMO), folders).bank.bytes_of("a0")
    narrow = make_engine(config(DEMO, max_adapters=4, adapter_bytes=2 * size), folders)
    requests = [(asked(f"{turn}{name}", name, max_tokens=6), PROMPT) for turn in range(2) for name in folders]
    for one, prompt in requests:
        narrow.add(sequences(narrow, one, prompt))
    outcomes: dict[tuple[str, int], Outcome] = {}
    while narrow.has_work:
        collect(outcomes, narrow.step())
        narrow.check_integrity()
        assert narrow.bank.num_bytes <= 2 * size
        assert len(narrow.residency.versions) <= 2
    assert tokens(outcomes) == tokens(complete(make_engine(config(DEMO), folders), requests))
    assert all(each.finish.reason in (FinishReason.LENGTH, FinishReason.STOP) for each in outcomes.values())  # type: ignore[attr-defined]
    assert narrow.residency.num_loads >= 4
    assert narrow.residency.num_hits + narrow.residency.num_loads >= 8
    assert (narrow.residency.max_bytes, narrow.residency.num_slots) == (2 * size, 4)


def test_a_new_version_finds_no_prefix_of_the_one_before(tmp_path: Path) -> None:
    module, prompt = module_of(DEMO), [11 + each % 90 for each in range(60)]
    one, other = (save_adapter(tmp_path / f"v{seed}", module, seed=seed) for seed in (1, 2))
    engine = make_engine(config(DEMO), {"v1": one})
    complete(engine, [(asked("first", "v1"), prompt)])
    found = engine.load.num_prefix_hit_tokens
    complete(engine, [(asked("again", "v1"), prompt)])
    assert engine.load.num_prefix_hit_tokens > found
    found = engine.load.num_prefix_hit_tokens
    trial = try_out(engine, other, "v2")
    ours = complete(engine, [(asked("new", "v2"), prompt)])
    assert trial.exception(0) is None
    assert engine.load.num_prefix_hit_tokens == found
    assert tokens(ours) == tokens(complete(make_engine(config(DEMO), {"v2": other}), [(asked("new", "v2"), prompt)]))


def test_what_was_read_is_not_read_again_for_its_slot(engine: Engine, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", module_of(DEMO))
    adapter = load_adapter(folder, version="a", model=engine.model.module)
    weights, done = engine.bank.read(adapter), Future[None]()
    (folder / "adapter_model.safetensors").unlink()
    engine.admit(adapter)
    engine.try_adapter("a", weights, done)
    drain(engine)
    assert done.exception(0) is None
    assert torch.is_tensor(next(iter(weights.values())).down)
