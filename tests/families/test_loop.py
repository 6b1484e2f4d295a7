"""Which families the loop computes, and that it is their own modules' work to the rounding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve_app.core.request import RecordParams
from serve_app.engine.decoder.config_check import check_config
from serve_app.engine.decoder.loading import read_module
from serve_app.engine.decoder.loop import DecoderLoop, build_loop
from serve_app.engine.decoder.self_test import compute_in_steps, run_reference, settle, storage_for
from serve_app.engine.decoder.stored import StoredLinear
from serve_app.engine.decoder.text_part import FAMILIES, text_config
from tests.engine.harness import complete, config, make_engine, request
from tests.families.families import SERVED, Family
from tests.families.test_parity import whole_model

STAND_FOR_ALL = {"llama", "gemma3_text", "olmo2", "phi3"}
"""Plain; scales, windows and norms of heads; norms behind and of rows; linears that are joined already."""
IN_TABLE = [
    pytest.param(each, marks=() if each.label in STAND_FOR_ALL else pytest.mark.slow)
    for each in SERVED
    if each.name in FAMILIES
]
TEXTS = {
    "gemma3": "gemma3_text",
    "llava": "llama",
    "mistral3": "mistral",
    "internvl": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
}
"""Models that see, with the family of their part for text, which the loop computes or does not."""
MANY_TOKENS = 60
"""Several times the families' windows of 16."""


def test_every_family_of_the_loop_is_tried_here() -> None:
    assert {each.values[0].name for each in IN_TABLE} == set(FAMILIES)  # type: ignore[union-attr]


@pytest.mark.law("One model")
@pytest.mark.parametrize("family", IN_TABLE, ids=lambda family: family.label)
def test_the_loop_computes_it_and_gives_the_logits_of_its_modules(
    family: Family, model_folder: Callable[[Family], Path]
) -> None:
    folder = model_folder(family)
    engine = make_engine(config(folder))
    assert engine._runner._loop is not None
    module = engine.model.module
    assert engine.model.scorings is not None
    loop = build_loop(module, engine.model.shape, engine.model.scorings)
    own = whole_model(folder)
    with torch.inference_mode():
        ids = torch.arange(MANY_TOKENS) * 7 % 256
        expected = own(ids[None]).logits[0]
        got = compute_long(loop, ids, own)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def compute_long(loop: DecoderLoop, ids: Tensor, own: PreTrainedModel) -> Tensor:
    """Logits of all ids by the loop, in chunks, which are longer than any window, and shorter."""
    reference = replace(run_reference(own), token_ids=ids)
    return compute_in_steps(
        reference, storage_for(own, reference), lambda step, _: loop(step), chunks=(29, 17, 12, 1, 1)
    )


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.slow
def test_the_text_of_a_model_that_sees_is_the_loops_where_its_family_is(
    name: str, model_folder: Callable[[Family], Path]
) -> None:
    (family,) = (each for each in SERVED if each.label == name)
    engine = make_engine(config(model_folder(family)))
    assert text_config(engine.model.module.config).model_type == TEXTS[name]
    assert (engine._runner._loop is not None) == (TEXTS[name] in FAMILIES)


def test_a_family_that_is_not_in_the_table_is_its_modules_work(model_folder: Callable[[Family], Path]) -> None:
    engine = make_engine(config(model_folder(Family(name="gpt2"))))
    assert engine._runner._loop is None


def load(folder: Path) -> PreTrainedModel:
    return whole_model(folder).requires_grad_(False)


@pytest.fixture
def llama(model_folder: Callable[[Family], Path]) -> PreTrainedModel:
    return load(model_folder(Family(name="llama")))


@pytest.mark.parametrize("family", IN_TABLE, ids=lambda family: family.label)
@torch.inference_mode()
def test_weights_that_stay_in_16_bits_compute_what_they_do_in_full(
    family: Family, model_folder: Callable[[Family], Path], tmp_path: Path
) -> None:
    whole = whole_model(model_folder(family)).bfloat16()
    whole.save_pretrained(tmp_path)
    stored = read_module(config(tmp_path, device="cpu"), check_config(tmp_path), torch.float32).eval()
    assert any(isinstance(each, StoredLinear) for each in stored.modules())
    ids = torch.arange(MANY_TOKENS)[None] * 7 % 250
    own = whole_model(tmp_path)(input_ids=ids).logits
    torch.testing.assert_close(stored(input_ids=ids).logits, own, rtol=1e-4, atol=1e-4)
    assert settle(stored, run_reference(stored)) is not None


@pytest.mark.law("One model")
def test_a_model_whose_logits_are_not_the_loops_keeps_its_modules_and_says_so(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    llama.model.layers[1].self_attn.register_forward_hook(lambda *call: (call[2][0] * 1.5, call[2][1]))
    with caplog.at_level(logging.WARNING):
        assert settle(llama, run_reference(llama)) is None
    assert "not by the loop: its logits are off by" in caplog.text


def test_a_model_with_parameters_that_the_loop_does_not_know_keeps_its_modules(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    llama.model.layers[0].mlp.extra = nn.Linear(32, 32)
    with caplog.at_level(logging.WARNING):
        assert settle(llama, run_reference(llama)) is None
    assert "not by the loop: LlamaMLP has ['extra']" in caplog.text


def test_a_model_that_is_the_loops_gives_no_warning(llama: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert settle(llama, run_reference(llama)) is not None
    assert caplog.text == ""


def test_tokens_whose_logits_nobody_wants_end_behind_the_last_layers_attention(
    model_folder: Callable[[Family], Path],
) -> None:
    engine = make_engine(config(model_folder(Family(name="llama")), max_batch_tokens=40))
    rows: dict[str, list[int]] = {"first": [], "last": []}
    first, last = engine.model.module.model.layers
    for name, layer in (("first", first), ("last", last)):
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, given, name=name: rows[name].append(len(given[0])))
    complete(engine, [(request("a", max_tokens=2), list(range(90)))])
    assert rows == {"first": [40, 40, 10, 1], "last": [0, 0, 1, 1]}


def test_a_step_of_which_hidden_states_are_wanted_is_its_modules_work(model_folder: Callable[[Family], Path]) -> None:
    engine = make_engine(config(model_folder(Family(name="llama"))))
    calls: list[int] = []
    engine.model.module.get_decoder().register_forward_hook(lambda *_: calls.append(1))
    complete(engine, [(request("plain", max_tokens=2), [5, 6, 7])])
    assert calls == []
    complete(engine, [(request("recorded", max_tokens=2, record=RecordParams(hidden_states="last")), [8, 6, 7])])
    assert len(calls) == 2
