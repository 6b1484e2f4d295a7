"""Law: an adapter shares prefixes with the base exactly where it leaves every key and value as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from serve_app.catalog.adapters import read_adapter
from serve_app.core.names import Part, mixed
from serve_app.engine.lora.adapter import linear_modules
from serve_app.engine.lora.registration import bind_adapters, keeps_prefix
from tests.engine.harness import complete, config, make_engine, request
from tests.engine.test_adapters import peft_greedy, train_nothing

pytestmark = pytest.mark.slow

LAST = r".*layers\.1\.(self_attn\.[qo]_proj|mlp\..*_proj)"
PROMPT = list(range(20, 90))


def keys_and_values(model: Any) -> list[Tensor]:
    with torch.inference_mode():
        cache = model(input_ids=torch.tensor([PROMPT]), use_cache=True).past_key_values
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.law("Adapters")
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT has opinions on Conv1D
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_it_is_said_of_no_module_that_changes_a_key_or_value(architecture: str, random_models: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(random_models / architecture, local_files_only=True, dtype="float32")
    before = keys_and_values(base)
    found = {}
    for name in linear_modules(base):
        torch.manual_seed(1)
        fresh = AutoModelForCausalLM.from_pretrained(
            random_models / architecture, local_files_only=True, dtype="float32"
        )
        adapted = get_peft_model(
            fresh, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=[name], init_lora_weights=False)
        )
        after = keys_and_values(adapted)
        found[name] = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert found[name] or not keeps_prefix([name], base), name
    if architecture != "gpt2":  # whose modules it does not know
        assert {name for name, is_kept in found.items() if is_kept} == {
            name for name in found if keeps_prefix([name], base)
        }
        assert sum(found.values()) == 6, "the head; queries, output, and the three behind attention, of the last layer"


def test_an_adapter_of_the_last_layers_end_finds_the_prefixes_of_the_base(random_models: Path, tmp_path: Path) -> None:
    base = random_models / "llama"
    folders = {
        "end": train_nothing(base, tmp_path / "end", 1, r=4, lora_alpha=16, target_modules=LAST),
        "all": train_nothing(base, tmp_path / "all", 2, r=4, lora_alpha=16),
    }
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype="float32")
    records = [read_adapter(folder, root=tmp_path) for folder in folders.values()]
    cards = {card.name: replace(card, version=card.name) for card in bind_adapters(records, model)[1]}
    assert {name: card.keeps_prefix for name, card in cards.items()} == {"end": True, "all": False}
    engine = make_engine(config(base), folders)

    def cached(name: str, *parts: Part) -> tuple[int, list[int]]:
        asked = replace(request(name), model=mixed("toy", parts))
        outcome = complete(engine, [(asked, PROMPT)])[name, 0]
        report = outcome.deltas[0].prompt
        assert report is not None
        return report.num_cached_tokens, outcome.token_ids

    end, whole = cards["end"].part(1.0), cards["all"].part(1.0)
    assert cached("base")[0] == 0
    found, tokens = cached("end", end)
    assert (found, tokens) == (64, peft_greedy(base, folders["end"], [PROMPT], 12)[0])
    assert cached("half", replace(end, scale=0.5))[0] == 64
    assert cached("all", whole)[0] == 0
    assert cached("both", replace(end, scale=0.5), whole)[0] == 64, "what the other one computed"
    assert cached("both, less", end, replace(whole, scale=0.5))[0] == 0
    assert cached("again", replace(end, scale=-1), replace(whole, scale=0.5))[0] == 64
