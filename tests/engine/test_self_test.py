"""A model that the engine would compute wrongly is refused when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DiffLlamaConfig, LlamaConfig, PreTrainedModel, Qwen2Config

from serve_app.engine.decoder.self_test import check, distance, run_reference
from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.engine.kv.storage import KeyValueShape, LayerShape
from tests.families.families import GEMMA_3N
from tests.families.making import fill, make_config

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make(config: object) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.float().eval()


def probe(model: PreTrainedModel) -> KeyValueShape:
    reference = run_reference(model)
    check(model, reference)
    return reference.shape


def test_a_sound_model_tells_its_shape_and_keeps_its_own_attention(tmp_path: Path) -> None:
    model = make(LlamaConfig(**SMALL))
    assert probe(model).layers == (LayerShape(heads=2, key_dim=8, value_dim=8),) * 3
    assert model.config._attn_implementation == "eager"


def test_a_model_that_attends_twice_per_layer_is_refused() -> None:
    with pytest.raises(ModelNotSupported, match="diffllama"):
        probe(make(DiffLlamaConfig(**SMALL)))


def test_a_model_whose_rows_see_each_other_is_refused() -> None:
    model = make(LlamaConfig(**SMALL))
    head = model.lm_head

    class Mixing(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = head(hidden + hidden.mean(dim=1, keepdim=True))
            return logits

    model.lm_head = Mixing()
    with pytest.raises(ModelNotSupported, match="off by"):
        probe(model)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_that_are_chosen_by_rounding_are_no_fault(family: str) -> None:
    """By their order alone, sums in 16 bits have one of each six of these choose otherwise in the two forwards."""
    for seed in range(6):
        probe(mixture(family, seed, torch.bfloat16))


FAULTS = {torch.float32: 1.01, torch.bfloat16: 1.1}
"""By what attention is wrong; a dense model that is wrong by so much is refused as surely, and by half of it nearly."""


@pytest.mark.parametrize("dtype", FAULTS, ids=str)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_wrong_attention_is_refused_of_models_with_experts_too(family: str, dtype: torch.dtype) -> None:
    for seed in range(6):
        model = mixture(family, seed, dtype)
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_hook(_wrong_unless_eager(model, FAULTS[dtype]))
        with pytest.raises(ModelNotSupported, match="off by"):
            probe(model)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_wrong_attention_is_refused_where_inputs_are_rounded(family: str) -> None:
    model = mixture(family, 0, torch.float32)
    reference = replace(run_reference(model), rounds=True)
    check(model, reference)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(_wrong_unless_eager(model, 1.25))
    with pytest.raises(ModelNotSupported, match="off by"):
        check(model, reference)


@pytest.mark.parametrize(
    ("rounds", "dtype", "part"),
    [
        (False, torch.float32, 0.001),
        (False, torch.bfloat16, 0.05),
        (True, torch.float32, 0.1),
        (True, torch.bfloat16, 0.1),
    ],
)
def test_logits_may_differ_by_what_numbers_and_rounding_make_of_them(
    rounds: bool, dtype: torch.dtype, part: float
) -> None:
    reference = replace(run_reference(mixture("mixtral", 0, torch.float32)), rounds=rounds)
    largest = max(1.0, float(reference.logits.abs().max()))
    for factor, is_allowed in ((0.95, True), (1.05, False)):
        difference, limit = distance(reference, reference.logits + factor * part * largest, dtype)
        assert (difference <= limit) is is_allowed


def mixture(family: str, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(make_config(family), attn_implementation="eager")
    fill(model, seed)
    return model.to(dtype).eval()


def _wrong_unless_eager(model: PreTrainedModel, factor: float) -> Callable[..., torch.Tensor]:
    def scale(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        return output if model.config._attn_implementation == "eager" else output * factor

    return scale


def test_a_window_that_is_longer_than_the_probe_must_reach_attention() -> None:
    config = Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=48, layer_types=["full_attention"] * 2 + ["sliding_attention"]
    )
    model = make(config)
    assert len(probe(model).layers) == 3
    model.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(ModelNotSupported, match="layer 2 hands attention no window"):
        probe(model)


def test_layers_that_attend_to_an_earlier_ones_keys_keep_none_of_their_own() -> None:
    model = make(make_config("gemma3n_text", GEMMA_3N))
    shape = probe(model)
    assert (len(shape.layers), shape.places, shape.readers) == (2, {2: 0, 3: 1}, {2, 3})
