"""Linears that are laid out for this machine: the same numbers, and no weight that is there twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from serve_app.engine.decoder.config_check import held_bytes
from serve_app.engine.decoder.layout import lay_out
from serve_app.engine.decoder.linears import (
    MIN_SIZE,
    JointLinear,
    LinearPart,
    PackedEmbedding,
    PackedLinear,
    can_join,
    join,
    pays,
)
from tests.engine.laid_out import packed_bytes

SMALL = {
    "vocab_size": 1031,
    "hidden_size": 768,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}


@pytest.fixture
def random() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(*shape, generator=generator)


def make_model(**settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, **settings))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(131, 48), (64, 7), (1, 33)])
def test_a_packed_linear_gives_what_the_plain_one_does(
    outputs: int, inputs: int, rows: int, random: Callable[..., Tensor]
) -> None:
    weight, bias, x = random(outputs, inputs), random(outputs), random(rows, inputs + 5)[:, 2:-3]
    got = PackedLinear(weight, bias)(x)
    assert got.shape == (rows, outputs)
    torch.testing.assert_close(got, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_a_packed_weight_is_read_back_bit_for_bit(random: Callable[..., Tensor]) -> None:
    weight = random(131, 48)
    packed = PackedLinear(weight)
    assert torch.equal(packed.weight, weight)
    assert packed.frame.shape == weight.shape
    assert packed.frame.dtype == weight.dtype
    assert packed.frame.untyped_storage().nbytes() == weight.itemsize, "sizes alone take no memory"


def test_what_onednn_does_not_lay_out_stays_plain() -> None:
    assert pays(torch.zeros(MIN_SIZE, 1))
    assert not pays(torch.zeros(MIN_SIZE, 1, dtype=torch.float64))
    assert not pays(torch.zeros(MIN_SIZE, 1, device="meta"))


@pytest.mark.parametrize("size", [48, 8192])
def test_parts_of_one_product_are_the_linears_that_they_were_and_it_is_computed_once(
    size: int, random: Callable[..., Tensor]
) -> None:
    linears = [nn.Linear(size, outputs) for outputs in (48, 16, 16)]
    parts = join(linears)
    calls: list[int] = []
    parts[0].joint.whole.register_forward_hook(lambda *_: calls.append(1))
    for x in (random(5, size), random(2, size)):
        for part, linear in zip(parts, linears, strict=True):
            torch.testing.assert_close(part(x), linear(x), rtol=1e-5, atol=1e-5)
    assert len(calls) == 2, "once for each input"
    assert [torch.equal(part.weight, linear.weight) for part, linear in zip(parts, linears, strict=True)] == [True] * 3
    assert [part.bias.tolist() for part in parts if part.bias is not None] == [each.bias.tolist() for each in linears]


def test_a_part_alone_or_out_of_order_is_right_too(random: Callable[..., Tensor]) -> None:
    linears = [nn.Linear(48, outputs, bias=False) for outputs in (48, 16, 16)]
    parts = join(linears)
    x, other = random(5, 48), random(5, 48)
    for at, asked in ((1, x), (0, other), (2, x), (1, x), (1, other)):
        torch.testing.assert_close(parts[at](asked), linears[at](asked), rtol=1e-5, atol=1e-5)


def test_a_joint_linear_keeps_nothing_of_a_step_behind_its_last_part(random: Callable[..., Tensor]) -> None:
    parts = join([nn.Linear(48, 16), nn.Linear(48, 16)])
    x = random(3, 48)
    noted = weakref.ref(x)
    for part in parts:
        part(x)
    del x
    gc.collect()
    assert noted() is None


def test_linears_that_differ_in_bias_or_input_are_not_joined() -> None:
    assert can_join([nn.Linear(4, 2), nn.Linear(4, 3)])
    assert not can_join([nn.Linear(4, 2), nn.Linear(4, 3, bias=False)])
    assert not can_join([nn.Linear(4, 2), nn.Linear(5, 3)])
    assert not can_join([nn.Linear(4, 2), None])


@pytest.mark.law("One model")
@pytest.mark.parametrize("is_tied", [False, True])
@torch.inference_mode()
def test_a_model_that_was_laid_out_gives_its_own_logits_and_holds_no_weight_twice(is_tied: bool) -> None:
    model = make_model(tie_word_embeddings=is_tied)
    ids = torch.arange(40)[None] * 3 + 900
    expected, held = model(ids).logits, held_bytes(model)
    plain = [weakref.ref(each.weight) for each in model.modules() if type(each) is nn.Linear]
    lay_out(model, joins=True)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert held_bytes(model) + packed_bytes(model) == held
    gc.collect()
    assert [each for each in plain if each() is not None] == []
    kinds = {type(each) for each in model.modules()}
    assert {PackedLinear, LinearPart} <= kinds
    assert nn.Linear not in kinds


@pytest.mark.parametrize("factor", [None, 7.5])
def test_a_tied_embedding_is_read_from_the_head_bit_for_bit(
    factor: float | None, random: Callable[..., Tensor]
) -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * (factor or 1.0)

    embedding = nn.Embedding(131, 48) if factor is None else Scaled(131, 48)
    if factor is not None:
        embedding.embed_scale = torch.tensor(factor)
    with torch.no_grad():
        embedding.weight.copy_(random(131, 48))
    found = PackedEmbedding.find(PackedLinear(embedding.weight), embedding)
    assert found is not None
    ids = torch.tensor([[0, 130, 64, 63], [1, 1, 127, 128]])
    assert torch.equal(found(ids), embedding(ids))
    assert torch.equal(found.weight, embedding.weight)


def test_an_embedding_that_computes_otherwise_is_not_read_from_the_head(random: Callable[..., Tensor]) -> None:
    class Strange(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + 1

    embedding = Strange(131, 48)
    assert PackedEmbedding.find(PackedLinear(embedding.weight), embedding) is None


def test_a_head_stays_plain_where_a_tied_embedding_could_not_be_read_from_it() -> None:
    model = make_model(tie_word_embeddings=True)

    class Strange(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 2

    strange = Strange(SMALL["vocab_size"], SMALL["hidden_size"])
    strange.weight = model.lm_head.weight
    model.set_input_embeddings(strange)
    lay_out(model, joins=False)
    assert type(model.lm_head) is nn.Linear
    assert model.get_input_embeddings() is strange


def test_small_weights_stay_plain_and_large_ones_are_packed() -> None:
    small, large = (JointLinear([nn.Linear(768, size), nn.Linear(768, size)]).whole for size in (64, 512))
    assert type(small) is nn.Linear
    assert type(large) is PackedLinear


def test_a_joint_linear_of_a_type_that_is_not_packed_is_plain() -> None:
    joint = JointLinear([nn.Linear(1024, 512, dtype=torch.float64)] * 2)
    assert type(joint.whole) is nn.Linear
