"""Law: a mix of adapters is the sum of what each of them changes, to the token, and costs no slot of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM

from serve_app.engine.lora.adapter import read_weights, weight_of
from tests.engine.adapter_files import load_adapter
from tests.engine.harness import complete, config, make_engine, reference_greedy, request
from tests.engine.test_adapters import PROMPTS, VARIANTS, train_nothing

pytestmark = pytest.mark.slow

CAT_MIXES: tuple[dict[str, float], ...] = ({"plain": 0.7, "few": 0.3}, {"plain": 0.5}, {"few": 1.5, "plain": -0.8})
PLAIN_MIXES: tuple[dict[str, float], ...] = (
    *CAT_MIXES,
    {"rslora": 1.0, "patterns": 1.0},
    {"plain": -0.8, "rslora": 1.5, "few": 0.25},
)
DORA_MIXES: tuple[dict[str, float], ...] = ({"dora": 0.6}, {"dora": 0.5, "plain": 0.75}, {"few": 0.3, "dora": -0.4})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, random_models: Path) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("mixes")
    return {
        name: train_nothing(random_models / "llama", out / name, seed, **settings)
        for seed, (name, settings) in enumerate(VARIANTS.items())
    }


def base_model(random_models: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(random_models / "llama", local_files_only=True, dtype="float32").eval()


def greedy(model: nn.Module) -> list[list[int]]:
    return [reference_greedy(model, prompt, 12) for prompt in PROMPTS]


def peft_mix(random_models: Path, folders: dict[str, Path], mix: dict[str, float]) -> list[list[int]]:
    """PEFT's own weighted sum; `cat` is the sum of the changes, `linear` would mix the factors crosswise.

    Not of rsLoRA or patterns, whose scaling PEFT applies to the sum once more.
    """
    names = list(mix)
    model: Any = PeftModel.from_pretrained(base_model(random_models), folders[names[0]], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(folders[name], adapter_name=name)
    model.add_weighted_adapter(names, list(mix.values()), adapter_name="mix", combination_type="cat")
    model.set_adapter("mix")
    return greedy(model.eval())


def peft_together(random_models: Path, folders: dict[str, Path], mix: dict[str, float]) -> list[list[int]]:
    """PEFT with all of them active, each scaled."""
    names = list(mix)
    model: Any = PeftModel.from_pretrained(base_model(random_models), folders[names[0]], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(folders[name], adapter_name=name)
    model.base_model.set_adapter(names)
    for layer in model.modules():
        for name in names:
            if isinstance(layer, LoraLayer) and name in layer.scaling:
                layer.scaling[name] *= mix[name]
    return greedy(model.eval())


@torch.no_grad()
def merged_mix(random_models: Path, folders: dict[str, Path], mix: dict[str, float]) -> list[list[int]]:
    """Weights of one's own: the base's, and of each adapter so much of the way to the weights that it makes."""
    model = base_model(random_models)
    linears = dict(model.named_modules())
    changes: dict[str, torch.Tensor] = {}
    for name, scale in mix.items():
        adapter = load_adapter(folders[name], version=name, model=model)
        for module, low_rank in read_weights(adapter, model, linears, dtype=torch.float32).items():
            base = weight_of(linears[module])
            changed = base if low_rank.gain is None else base * low_rank.gain[:, None]
            changed = changed + low_rank.up @ low_rank.down
            changes[module] = changes.get(module, torch.zeros_like(base)) + scale * (changed - base)
    for module, change in changes.items():
        weight_of(linears[module]).add_(change)
    return greedy(model)


@pytest.mark.law("Adapters")
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT has opinions on several adapters
def test_mixes_beside_each_other_each_equal_pefts_own_weighted_sum(
    random_models: Path, folders: dict[str, Path]
) -> None:
    engine = make_engine(config(random_models / "llama", max_num_sequences=24), folders)
    asked = {
        (at, i): (request(f"{at}-{i}", mix=mix), prompt)
        for i, prompt in enumerate(PROMPTS)
        for at, mix in enumerate((*PLAIN_MIXES, *DORA_MIXES))
    }
    outcomes = complete(engine, list(asked.values()))
    for reference, mixes in (
        (peft_mix, CAT_MIXES),
        (peft_together, PLAIN_MIXES),
        (merged_mix, (*PLAIN_MIXES, *DORA_MIXES)),
    ):
        for at, mix in enumerate(mixes):
            found = [outcomes[f"{at}-{i}", 0].token_ids for i in range(len(PROMPTS))]
            assert found == reference(random_models, folders, mix), f"{mix}, as {reference.__name__} has it"


def test_scale_0_is_the_base_and_one_alone_at_scale_1_is_the_adapter(
    random_models: Path, folders: dict[str, Path]
) -> None:
    engine = make_engine(config(random_models / "llama", max_num_sequences=8), folders)
    none = request("none", mix={"plain": 0.0, "dora": 0.0})
    one = request("one", mix={"plain": 1.0, "dora": 0.0})
    assert (none.model, one.model) == (request("x").model, request("x", adapter="plain").model)
    found = complete(engine, [(none, PROMPTS[0]), (one, PROMPTS[0]), (request("adapter", adapter="plain"), PROMPTS[0])])
    assert found["none", 0].token_ids == greedy(base_model(random_models))[0]
    assert found["one", 0].token_ids == found["adapter", 0].token_ids != found["none", 0].token_ids


def test_equal_mixes_share_prefixes_and_no_other_does(random_models: Path, folders: dict[str, Path]) -> None:
    engine = make_engine(config(random_models / "llama"), folders)
    prompt = list(range(20, 90))

    def cached(name: str, **model: Any) -> int:
        report = complete(engine, [(request(name, max_tokens=2, **model), prompt)])[name, 0].deltas[0].prompt
        assert report is not None
        return report.num_cached_tokens

    assert cached("first", mix={"plain": 0.7, "few": 0.3}) == 0
    assert cached("again", mix={"few": 0.3, "plain": 0.7}) == 64
    assert cached("other scales", mix={"plain": 0.3, "few": 0.7}) == 0
    assert cached("half of it", mix={"plain": 0.7}) == 0
    assert cached("adapter", adapter="plain") == 0
    assert cached("base") == 0


def test_a_mix_takes_the_slots_of_its_adapters_and_waits_for_them(
    random_models: Path, folders: dict[str, Path]
) -> None:
    mixes = ({"plain": 0.7, "few": 0.3}, {"plain": 0.2, "few": 0.9}, {"rslora": 0.5, "dora": 0.5}, {"few": 2.0})
    asked = [
        (request(f"{at}-{i}", mix=mix), prompt) for i, prompt in enumerate(PROMPTS) for at, mix in enumerate(mixes)
    ]
    wide = make_engine(config(random_models / "llama", max_num_sequences=24), folders)
    narrow = make_engine(config(random_models / "llama", max_num_sequences=24, max_adapters=2), folders)
    expected = {key: outcome.token_ids for key, outcome in complete(wide, asked).items()}
    assert wide._slots.num_loads == 4, "however many mixes there are of them"
    assert {key: outcome.token_ids for key, outcome in complete(narrow, asked).items()} == expected
