"""Models with weights in few bits: the laws hold of them, and what they are compared with is computed apart.

The reference is transformers' own model with the dequantised weights, whose linears round their inputs by the
definition.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from serve_app.engine.decoder.config_check import check_config, held_bytes, weight_bytes
from serve_app.engine.decoder.loading import load_model, read_module
from serve_app.engine.decoder.quantized_linear import (
    SEVEN_BITS,
    Bits,
    Int4Groups,
    Int8Rows,
    QuantisedLinear,
    int8_kernel,
)
from serve_app.engine.decoder.stored import receiving, settle_weights
from serve_app.engine.decoder.text_part import ModelNotSupported
from tests.engine.conftest import DEMO, DEMO_ADAPTERS
from tests.engine.harness import complete, config, make_engine, request
from tests.families.making import save_model

pytestmark = pytest.mark.slow

MAX_TOKENS = 16
TIE = 0.3
"""Of logits that reach over tens."""
TEXTS = (
    "Once upon a time there was a little cat", "The dog and the owl went", "def add(a, b):\n    return", "One day,",
    "A frog sat by the river and looked at the sky. It was",
)  # fmt: skip


class RoundingLinear(nn.Linear):
    """x as int8 kernels round it, times a plain weight."""

    levels = SEVEN_BITS

    def forward(self, x: Tensor) -> Tensor:
        steps = x.abs().amax(-1, keepdim=True) / self.levels
        return nn.functional.linear((x / steps).round() * steps, self.weight, self.bias)


class HalfLinear(nn.Linear):
    """In bfloat16 but for sums."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x.bfloat16().float(), self.weight).bfloat16().float()
        return y if self.bias is None else y + self.bias


def read(folder: Path, bits: Bits) -> Any:
    """The model before the loop lays it out."""
    return read_module(config(folder, weights=bits), check_config(folder), torch.float32).requires_grad_(False)


def reference(folder: Path, bits: Bits) -> Any:
    """transformers' model with the weights that ours computes with."""
    ours = read(folder, bits)
    own = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="float32").eval()
    for name, linear in ours.named_modules():
        if isinstance(linear, QuantisedLinear):
            kind = RoundingLinear if isinstance(linear.stored, Int8Rows) else HalfLinear
            plain = kind(linear.in_features, linear.out_features, bias=linear.bias is not None)
            plain.weight, plain.bias = nn.Parameter(linear.weight, requires_grad=False), linear.bias
            parent, _, child = name.rpartition(".")
            setattr(own.get_submodule(parent), child, plain)
    RoundingLinear.levels = int8_kernel()(
        Int8Rows(numbers=torch.ones(1, 1).to(torch.int8), scales=torch.ones(1))
    ).levels
    return own


def prompts_of(engine: Any) -> list[list[int]]:
    return [list(engine.tokenizer.encode_text(text)) for text in TEXTS]


def assert_follows(own: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the likeliest by the reference, or as good as that: inputs that lie between two numbers may be
    rounded to either, so logits are the same to a bound."""
    with torch.inference_mode():
        logits = own(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float((logits.amax(1) - chosen).max()) < TIE


@pytest.mark.law("Few bits")
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_greedy_tokens_are_the_references_likeliest_in_company_chunks_and_hits(bits: Bits) -> None:
    engine = make_engine(config(DEMO, weights=bits))
    assert engine.model.scorings is not None, "the loop does not compute it"
    own, prompts = reference(DEMO, bits), prompts_of(engine)
    for attempt in ("cold", "with hits"):
        asked = [(request(f"{attempt}-{i}", max_tokens=MAX_TOKENS), ids) for i, ids in enumerate(prompts)]
        outcomes = complete(engine, asked)
        for i, ids in enumerate(prompts):
            assert_follows(own, ids, outcomes[f"{attempt}-{i}", 0].token_ids)
    for i, ids in enumerate(prompts):
        [alone] = complete(engine, [(request(f"alone-{i}", max_tokens=MAX_TOKENS), ids)]).values()
        assert_follows(own, ids, alone.token_ids)


@pytest.mark.law("Few bits")
def test_adapters_beside_each_other_follow_peft_on_the_dequantised_base() -> None:
    names = ["pirate", "shout", "json"]
    engine = make_engine(config(DEMO, weights="int8"), {name: DEMO_ADAPTERS / name for name in names})
    prompts = prompts_of(engine)
    asked = [
        (request(f"{name}-{i}", max_tokens=MAX_TOKENS, adapter=name), ids)
        for name in names
        for i, ids in enumerate(prompts)
    ]
    outcomes = complete(engine, asked)
    for name in names:
        adapted = PeftModel.from_pretrained(reference(DEMO, "int8"), DEMO_ADAPTERS / name).eval()
        for i, ids in enumerate(prompts):
            assert_follows(adapted, ids, outcomes[f"{name}-{i}", 0].token_ids)


@pytest.mark.parametrize(("bits", "most_divergence"), [("int8", 0.01), ("int4", 0.25)])
def test_the_demo_loses_little(bits: Bits, most_divergence: float) -> None:
    engine = make_engine(config(DEMO, weights=bits))
    own = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32").eval()
    ours = read(DEMO, bits)
    text = " ".join(TEXTS[:2]) + " to the river, and they were happy. They played all day. " * 4
    ids = torch.tensor([list(engine.tokenizer.encode_text(text))])  # type: ignore[attr-defined]
    with torch.inference_mode():
        full, few = (model(ids).logits[0, :-1].log_softmax(-1) for model in (own, ours))
    divergence = (full.exp() * (full - few)).sum(-1).mean()
    assert 0 < float(divergence) < most_divergence


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize(("kind", "settings"), [("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("gpt2", {})])
def test_all_linears_are_in_few_bits_and_counted_so(
    kind: str, settings: dict[str, Any], bits: Bits, tmp_path: Path
) -> None:
    inner = {"n_inner": 64} if kind == "gpt2" else {"intermediate_size": 64}
    save_model(kind, {**inner, **settings}, tmp_path)
    module = read(tmp_path, bits)
    few = [each for each in module.modules() if isinstance(each, QuantisedLinear)]
    head: Any = module.get_output_embeddings()
    assert isinstance(head.stored, Int8Rows), "what the head loses is lost to every choice"
    assert sum(isinstance(each.stored, Int4Groups) for each in few) == (len(few) - 1 if bits == "int4" else 0)
    assert not any(type(each).__name__ in ("Linear", "Conv1D") for each in module.modules())
    stored = sum(each.stored.numbers.numel() for each in few if each is not head)
    stored = stored + stored // 8 if bits == "int8" else stored * 5 // 8
    expected = held_bytes(module) + (stored if bits == "int4" else sum(e.stored.numbers.numel() for e in few[:-1]))
    assert weight_bytes(check_config(tmp_path), torch.float32, bits) == expected + head.stored.numbers.numel()


def test_never_more_than_one_weight_is_there_in_full() -> None:
    """What is read is seen go before the next is read, but for what stays: embeddings, norms, the head that is tied."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Slice:
        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor

        def __getitem__(self, index: Any) -> Tensor:
            nonlocal most
            most = max(most, sum(each() is not None for each in alive))
            read = self._tensor.float().clone()
            if "proj" in self.name:
                alive.append(weakref.ref(read))
            return read

        name = ""

        def get_dtype(self) -> str:
            return "F32"

        def get_shape(self) -> list[int]:
            return list(self._tensor.shape)

    slices = {}
    for name, tensor in load_file(DEMO / "model.safetensors").items():
        slices[name] = Slice(tensor)
        slices[name].name = name
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # as loading does
    module = receiving(LlamaForCausalLM, "int8", lambda name: None).from_pretrained(
        None, state_dict=slices, config=AutoConfig.from_pretrained(DEMO, local_files_only=True), dtype=torch.float32
    )
    settle_weights(module)
    assert len(alive) == 6 * 7
    assert most <= 1


def test_int4_is_refused_at_start_by_the_name_of_what_it_does_not_fit(tmp_path: Path) -> None:
    save_model("llama", {"intermediate_size": 48}, tmp_path)
    with pytest.raises(ModelNotSupported, match=r"do not divide the 48 of model\.layers\.0\.mlp\.down_proj \[32, 48\]"):
        load_model(config(tmp_path, weights="int4"))
    assert load_model(config(tmp_path, weights="int8")).max_model_len == 256


def test_a_router_of_experts_stays_in_full(tmp_path: Path) -> None:
    save_model("qwen2_moe", {}, tmp_path)
    module = read(tmp_path, "int8")
    linears = {name for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    assert all(name.endswith("gate") for name in linears)
    assert any(isinstance(each, QuantisedLinear) for each in module.modules())
