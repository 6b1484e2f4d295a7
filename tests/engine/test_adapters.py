"""Law: a row is computed with the adapter it named; adapters and the base share one step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from serve_app.engine.engine import Engine
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.kernels.openmp import libgomp
from tests.engine.adapter_files import load_adapter, save_adapter
from tests.engine.conftest import DEMO, DEMO_ADAPTERS
from tests.engine.harness import complete, config, make_engine, reference_greedy, request

pytestmark = pytest.mark.slow

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 16},
    "rslora": {"r": 6, "lora_alpha": 8, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7},
        "alpha_pattern": {"v_proj": 32},
    },
    "dora": {"r": 4, "lora_alpha": 16, "use_dora": True},
    "few": {"r": 3, "lora_alpha": 12, "target_modules": ["o_proj", "down_proj"]},
}
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train_nothing(base: Path, out: Path, seed: int, **settings: Any) -> Path:
    """Save a PEFT adapter whose random weights move the output visibly."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype="float32")
    settings.setdefault("target_modules", ALL_LINEAR)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.08)
        if "lora_magnitude_vector" in name:
            parameter.data *= 1.0 + 0.3 * torch.rand_like(parameter)
    adapted.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory, random_models: Path) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("adapters")
    return {
        name: train_nothing(random_models / "llama", out / name, seed, **settings)
        for seed, (name, settings) in enumerate(VARIANTS.items())
    }


def peft_greedy(base: Path, folder: Path | None, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype="float32").eval()
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder).eval()
    return [reference_greedy(model, prompt, max_tokens) for prompt in prompts]


PROMPTS = [[5, 9, 200, 31], [77] * 3, list(range(10, 60)), [300, 12, 45, 45, 7, 8, 9]]


@pytest.mark.law("Adapters")
def test_rows_of_five_adapters_and_the_base_in_one_batch_each_equal_peft_alone(
    random_models: Path, adapter_folders: dict[str, Path]
) -> None:
    base = random_models / "llama"
    engine = make_engine(config(base, max_num_sequences=24), adapter_folders)
    asked = {}
    for name in [None, *adapter_folders]:
        for i, prompt in enumerate(PROMPTS):
            asked[name, i] = (request(f"{name}-{i}", adapter=name), prompt)
    outcomes = complete(engine, list(asked.values()))
    distinct = set()
    for name in [None, *adapter_folders]:
        folder = None if name is None else adapter_folders[name]
        expected = peft_greedy(base, folder, PROMPTS, 12)
        for i, tokens in enumerate(expected):
            assert outcomes[f"{name}-{i}", 0].token_ids == tokens, f"{name}, prompt {i}"
        distinct.add(str(expected))
    assert len(distinct) == len(VARIANTS) + 1, "the adapters should all differ"


def test_rows_that_kernels_change_beside_each_other_each_equal_peft_alone(
    random_models: Path, adapter_folders: dict[str, Path]
) -> None:
    base, folders = random_models / "llama", {name: adapter_folders[name] for name in ("plain", "rslora", "few")}
    engine = make_engine(config(base, max_num_sequences=24), folders)
    if libgomp() is not None and find_spec("serve_app.kernels.cpu") is not None:
        assert engine.bank._step.kernels is not None, "none has DoRA's gains, with which torch computes all"
    widths = {number: rows_of(engine, number) for number in (0, engine.model.module.config.num_hidden_layers - 1)}
    asked = [(request(f"{name}-{i}", adapter=name), ids) for name in [None, *folders] for i, ids in enumerate(PROMPTS)]
    outcomes = complete(engine, asked)
    for name in [None, *folders]:
        for i, tokens in enumerate(peft_greedy(base, folders.get(name or ""), PROMPTS, 12)):
            assert outcomes[f"{name}-{i}", 0].token_ids == tokens, f"{name}, prompt {i}"
    first, last = widths.values()
    assert max(first) > len(asked), "prompts are computed whole there"
    assert max(last) <= len(asked), "of prompts only the rows whose logits are wanted get so far"


def rows_of(engine: Engine, number: int) -> list[int]:
    """Into which the rows are written that a layer's last linear is given in each step."""
    found: list[int] = []
    down = engine.model.module.get_submodule(f"model.layers.{number}.mlp.down_proj")
    base = getattr(down, "base", down)
    base.register_forward_hook(lambda _, inputs, __: found.append(inputs[0].shape[-2]))
    return found


def test_an_adapter_of_huge_values_harms_nobody_beside_it(
    random_models: Path, adapter_folders: dict[str, Path], tmp_path: Path
) -> None:
    base = random_models / "llama"
    toy = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype="float32")
    folders = {**adapter_folders, "huge": save_adapter(tmp_path / "huge", toy, down=1e38, up=1.0)}
    engine = make_engine(config(base, max_num_sequences=24), folders)
    names = [None, "huge", "plain", "dora", "few"]
    asked = [(request(f"{name}-{i}", adapter=name), prompt) for i, prompt in enumerate(PROMPTS) for name in names]
    outcomes = complete(engine, asked)
    for name in (None, "plain", "dora", "few"):
        folder = None if name is None else adapter_folders[name]
        for i, tokens in enumerate(peft_greedy(base, folder, PROMPTS, 12)):
            assert outcomes[f"{name}-{i}", 0].token_ids == tokens, f"{name}, prompt {i}"
    for i in range(len(PROMPTS)):
        assert outcomes[f"huge-{i}", 0].deltas[-1].error is not None


def test_fewer_slots_than_adapters_give_the_same_rows(random_models: Path, adapter_folders: dict[str, Path]) -> None:
    base = random_models / "llama"
    wide = make_engine(config(base, max_num_sequences=24), adapter_folders)
    narrow = make_engine(config(base, max_num_sequences=24, max_adapters=2), adapter_folders)
    asked = [
        (request(f"{name}-{i}", adapter=name), prompt)
        for i, prompt in enumerate(PROMPTS)
        for name in [None, *adapter_folders]
    ]
    expected = {key: outcome.token_ids for key, outcome in complete(wide, asked).items()}
    assert {key: outcome.token_ids for key, outcome in complete(narrow, asked).items()} == expected


@pytest.mark.law("Adapters")
def test_an_adapter_shares_no_prefix_with_the_base(random_models: Path, adapter_folders: dict[str, Path]) -> None:
    base = random_models / "llama"
    engine = make_engine(config(base), adapter_folders)
    prompt = list(range(20, 90))
    complete(engine, [(request("base"), prompt)])
    after_base = complete(engine, [(request("adapted", adapter="plain"), prompt)])["adapted", 0]
    assert after_base.deltas[0].prompt is not None
    assert after_base.deltas[0].prompt.num_cached_tokens == 0
    assert after_base.token_ids == peft_greedy(base, adapter_folders["plain"], [prompt], 12)[0]
    again = complete(engine, [(request("again", adapter="plain"), prompt)])["again", 0]
    assert again.deltas[0].prompt is not None
    assert again.deltas[0].prompt.num_cached_tokens == 64


@pytest.mark.parametrize("target", [["c_attn", "c_proj"], ["c_fc"]])
def test_conv1d_layers_take_adapters(target: list[str], random_models: Path, tmp_path: Path) -> None:
    base = random_models / "gpt2"
    folder = train_nothing(
        base, tmp_path / "a", 3, r=4, lora_alpha=16, target_modules=target, fan_in_fan_out=True, use_dora=True
    )
    engine = make_engine(config(base), {"a": folder})
    outcomes = complete(engine, [(request(f"{i}", adapter="a"), prompt) for i, prompt in enumerate(PROMPTS)])
    for i, tokens in enumerate(peft_greedy(base, folder, PROMPTS, 12)):
        assert outcomes[f"{i}", 0].token_ids == tokens


def test_an_adapter_of_another_shape_is_refused(random_models: Path, adapter_folders: dict[str, Path]) -> None:
    other = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True)
    with pytest.raises(AdapterRefused, match="Serve the adapter with the base that it was trained on"):
        load_adapter(adapter_folders["plain"], version="a", model=other)


def test_64_mixed_requests_of_the_demo_equal_their_solo_results() -> None:
    folders = {folder.name: folder for folder in sorted(DEMO_ADAPTERS.glob("*/")) if list(folder.glob("*.safetensors"))}
    if len(folders) < 3:
        pytest.skip("the demo's adapters are not made yet")
    engine = make_engine(config(DEMO, max_num_sequences=64, max_batch_tokens=256), folders)
    names = [None, *folders]
    prompts = [list(range(30 + i, 36 + 2 * i)) for i in range(64)]
    asked = [
        (request(f"{i}", adapter=names[i % len(names)], max_tokens=24), prompt) for i, prompt in enumerate(prompts)
    ]
    together = complete(engine, asked)
    alone = make_engine(config(DEMO, prefix_cache=False), folders)
    for i, one in enumerate(asked):
        assert together[f"{i}", 0].token_ids == complete(alone, [one])[f"{i}", 0].token_ids
