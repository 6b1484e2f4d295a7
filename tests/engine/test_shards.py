"""Law: a model that is divided among processes gives what it gives whole, whatever shares its batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve_app.catalog.adapters import read_adapter
from serve_app.core.delta import TokenLogprob
from serve_app.core.request import LogprobParams, RecordParams
from serve_app.engine.decoder.loading import load_model, load_with
from serve_app.engine.engine import Engine
from serve_app.engine.lora.registration import bind_adapters
from serve_app.engine.tensor_parallel.workers import Workers
from serve_app.text.tokenizer import TextTokenizer
from tests.engine.adapter_files import load_adapter, save_adapter
from tests.engine.conftest import DEMO, DEMO_ADAPTERS
from tests.engine.harness import FreeGuesses, Outcome, complete, config, drain, request, sequences
from tests.engine.test_laws import adapter_names, keep_the_laws
from tests.engine.test_laws import engine_of as reference_of
from tests.engine.test_records import assert_close, recording_of, states_of
from tests.engine.test_trials import begin
from tests.families.families import Family, family
from tests.families.making import save_model

pytestmark = pytest.mark.slow

MODELS = (
    family("llama"),
    family("llama", "one key head", num_key_value_heads=1),
    family("llama", "biases everywhere", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    family("qwen2"),
    family("qwen3"),
    family("gemma2"),
    family("phi3"),
    family("olmo"),
)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One worker for all tests: to start it takes longer than all that they compute."""
    made = Workers(2, torch.device("cpu"), threads=1)
    yield made
    made.close()


def engine_of(folder: Path, adapters: dict[str, Path], workers: Workers | None, **changes: object) -> Engine:
    settings = config(folder, tensor_parallel=1 if workers is None else 2, **changes)
    model = load_model(settings) if workers is None else load_with(workers, settings)
    found = [replace(read_adapter(path, root=path.parent), version=name) for name, path in adapters.items()]
    bound, cards = bind_adapters(found, model.module, shard=model.shard)
    assert [card.reason for card in cards] == [None] * len(found)
    tokenizer = TextTokenizer.load(folder, vocab_size=model.vocab_size)
    engine = Engine(settings, model, tokenizer, bound)
    engine.tokenizer = tokenizer  # type: ignore[attr-defined]
    return engine


def run(engine: Engine, names: list[str]) -> dict[tuple[str, int], Outcome]:
    """Chunks, forks, prefix hits, adapters beside each other and a mix of them, twice."""
    generator = random.Random(5)
    shared = [generator.randrange(3, 256) for _ in range(40)]
    asked = []
    for attempt in range(2):
        for number in range(8):
            prompt = shared[: generator.choice([16, 40])] if number % 2 else []
            prompt = prompt + [generator.randrange(3, 256) for _ in range(generator.choice([1, 5, 30]))]
            adapter = names[number % (len(names) + 1) - 1] if number % (len(names) + 1) else None
            one = request(
                f"{attempt}-{number}",
                max_tokens=6,
                n=3 if number in (2, 5) else 1,
                adapter=adapter,
                mix={names[0]: 0.7, names[1]: -0.4} if number == 7 else None,
                logprobs=LogprobParams(top=2, prompt=number == 4),
            )
            asked.append((one, prompt))
    return complete(engine, asked)


def check_same(ours: dict[tuple[str, int], Outcome], whole: dict[tuple[str, int], Outcome]) -> None:
    assert ours.keys() == whole.keys()
    for key, expected in whole.items():
        assert ours[key].token_ids == expected.token_ids, key
        assert values(ours[key]) == pytest.approx(values(expected), abs=2e-4), key


def values(outcome: Outcome) -> list[float]:
    entries = [entry for entry in outcome.logprobs if isinstance(entry, TokenLogprob)]
    assert len(entries) >= len(outcome.token_ids)
    return [value for entry in entries for value in (entry.logprob or 0.0, *(other.logprob for other in entry.top))]


@pytest.mark.law("Shards")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.label)
def test_two_shards_give_the_tokens_and_scores_of_one(model: Family, workers: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(model.name, model.settings, folder, seed=model.seed)
    whole = load_model(config(folder))
    adapters = {
        name: save_adapter(tmp_path / name, whole.module, rank=rank, seed=rank, targets=targets)
        for name, rank, targets in (("every", 4, ("",)), ("few", 12, ("v_proj", "o_proj", "down_proj", "qkv_proj")))
    }
    per_block = whole.shape.bytes_per_token(whole.dtype) * 16
    limits = {"max_adapters": 2, "kv_cache_bytes": per_block * 40}
    divided = engine_of(folder, adapters, workers, **limits)
    assert divided.model.shape.layers[0].heads == max(1, whole.shape.layers[0].heads // 2)
    names = list(adapters)
    check_same(run(divided, names), run(engine_of(folder, adapters, None, **limits), names))
    assert divided.load.num_prefix_hit_tokens > 0


def test_random_schedules_keep_the_laws_where_a_model_is_divided(workers: Workers) -> None:
    folders = {name: DEMO_ADAPTERS / name for name in adapter_names() if name is not None}
    limits = {"max_batch_tokens": 17, "kv_cache_bytes": 6 * 2 * (32 + 32) * 4 * 16 * 12, "max_num_sequences": 6}
    engine = engine_of(DEMO, folders, workers, max_adapters=2, speculation="prompt_lookup", **limits)
    engine.speculator.costs = FreeGuesses()
    for seed in range(4):
        keep_the_laws(engine, reference_of(64, 60, 2), seed)


def test_an_adapter_is_swapped_in_everywhere_when_its_slot_changes_hands(workers: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model("llama", {}, folder)
    module = load_model(config(folder)).module
    names = [f"a{number}" for number in range(3)]
    adapters = {name: save_adapter(tmp_path / name, module, seed=seed) for seed, name in enumerate(names)}
    asked = [(request(f"{name}-{turn}", adapter=name), [7, 9, 11]) for turn in range(2) for name in names]
    divided, whole = (engine_of(folder, adapters, each, max_adapters=1) for each in (workers, None))
    ours, expected = complete(divided, asked), complete(whole, asked)
    assert {key: each.token_ids for key, each in ours.items()} == {k: each.token_ids for k, each in expected.items()}
    assert len({tuple(each.token_ids) for each in ours.values()}) == len(names), "the adapters say the same"


def test_an_adapter_that_comes_later_is_tried_and_computed_in_all_shards(workers: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model("llama", {}, folder)
    module = load_model(config(folder)).module
    good = save_adapter(tmp_path / "good", module, rank=12, seed=1)
    large = save_adapter(tmp_path / "large", module, down=1e19, up=1e19, targets=("down_proj",))
    asked = [(request(f"{name}", adapter=name, max_tokens=9), [7, 9, 11]) for name in ("good", None)]
    expected = complete(engine_of(folder, {"good": good}, None), asked)
    divided = engine_of(folder, {}, workers)
    [base] = [each for each in asked if each[0].model.adapter is None]
    divided.add(sequences(divided, *base))
    trials = {path.name: begin(divided, load_adapter(path, version=path.name, model=module)) for path in (good, large)}
    ours = drain(divided)
    assert trials["good"].exception(0) is None
    assert "too large" in str(trials["large"].exception(0))
    assert divided.drop_adapters(frozenset({"large"})) == {"large"}
    ours |= complete(divided, [each for each in asked if each is not base])
    assert {key: each.token_ids for key, each in ours.items()} == {k: each.token_ids for k, each in expected.items()}


def test_preemption_and_hidden_states_are_those_of_the_whole(workers: Workers, tmp_path: Path) -> None:
    save_model("llama", {}, tmp_path)
    whole = load_model(config(tmp_path))
    limits = {"kv_cache_bytes": whole.shape.bytes_per_token(whole.dtype) * 16 * 9}
    generator = random.Random(3)
    prompts = [[generator.randrange(3, 256) for _ in range(length)] for length in (12, 9, 10, 14, 3, 12)]
    record = RecordParams(hidden_states="all")
    asked = [
        (request(f"r{number}", max_tokens=40, record=record if number == 2 else None), prompt)
        for number, prompt in enumerate(prompts)
    ]
    divided = engine_of(tmp_path, {}, workers, **limits)
    ours, expected = complete(divided, asked), complete(engine_of(tmp_path, {}, None, **limits), asked)
    assert divided.num_preemptions > 0, "the store was not small enough to matter"
    assert {key: each.token_ids for key, each in ours.items()} == {k: each.token_ids for k, each in expected.items()}
    states, wanted = (states_of(recording_of(outcomes["r2", 0])) for outcomes in (ours, expected))
    assert_close(states, wanted)


def test_dora_is_refused_where_a_model_is_divided(workers: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model("llama", {}, folder)
    dora = save_adapter(tmp_path / "dora", load_model(config(folder)).module, use_dora=True)
    model = load_with(workers, config(folder, tensor_parallel=2))
    bound, [card] = bind_adapters([read_adapter(dora, root=tmp_path)], model.module, shard=model.shard)
    assert bound == []
    assert "DoRA" in (card.reason or "")
