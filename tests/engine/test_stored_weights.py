"""Weights that stay in 16 bits in their file until they are laid out: the same model, and never there in full twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedModel

from serve_app.engine.decoder.config_check import check_config, held_bytes
from serve_app.engine.decoder.layout import lay_out
from serve_app.engine.decoder.linears import LinearPart, PackedLinear
from serve_app.engine.decoder.loading import load_model, read_module
from serve_app.engine.decoder.quantized_formats import open_slices
from serve_app.engine.decoder.self_test import run_reference
from serve_app.engine.decoder.stored import StoredEmbedding, StoredLinear, Widening, stored_dtype
from tests.engine.harness import config
from tests.engine.laid_out import packed_bytes

SIZES: dict[str, Any] = {
    "vocab_size": 1031,
    "hidden_size": 768,
    "intermediate_size": 832,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
IDS = torch.arange(40)[None] * 3 + 900


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(*, dtype: torch.dtype = torch.bfloat16, **settings: object) -> Path:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | settings), dtype=dtype)
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.02
        model.save_pretrained(tmp_path)
        return tmp_path

    return make


def read(folder: Path) -> PreTrainedModel:
    settings = config(folder, device="cpu")
    return read_module(settings, check_config(folder), torch.float32).eval().requires_grad_(False)


def plain(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_tied", [False, True])
@torch.inference_mode()
def test_a_model_whose_weights_are_stored_computes_what_it_does_in_full(
    is_tied: bool, dtype: torch.dtype, folder: Callable[..., Path]
) -> None:
    path = folder(dtype=dtype, tie_word_embeddings=is_tied)
    stored, own = read(path), plain(path)
    narrow = [each for each in stored.parameters() if each.dtype == dtype]
    assert sum(each.numel() for each in narrow) == sum(each.numel() for each in own.parameters() if each.dim() > 1)
    torch.testing.assert_close(stored(IDS).logits, own(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True])
@torch.no_grad()
def test_what_was_stored_is_laid_out_bit_for_bit_and_in_memory_once(is_tied: bool, folder: Callable[..., Path]) -> None:
    path = folder(tie_word_embeddings=is_tied)
    laid_out, own = load_model(config(path, device="cpu")).module, plain(path)
    assert not [each for each in laid_out.modules() if isinstance(each, StoredLinear | StoredEmbedding)]
    assert held_bytes(laid_out) + packed_bytes(laid_out) == held_bytes(own)
    kinds = {type(each) for each in laid_out.modules()}
    assert {PackedLinear, LinearPart} <= kinds
    for name, module in own.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            ours: Any = laid_out.get_submodule(name)
            assert torch.equal(ours.weight, module.weight), name
            bias: Any = getattr(module, "bias", None)
            assert bias is None or torch.equal(ours.bias, bias), name


@torch.no_grad()
def test_all_linears_are_widened_in_the_same_memory(folder: Callable[..., Path]) -> None:
    model = read(folder())
    widening = Widening.of(model)
    assert widening is not None
    layers = [layer.self_attn for layer in model.model.layers]
    first = widening.together([model.lm_head, model.lm_head]).data_ptr()  # more than any other
    for parts in [model.lm_head], *([each.q_proj, each.k_proj, each.v_proj] for each in layers):
        expected = torch.cat([each.weight.float() for each in parts])
        whole = widening.together(parts)
        assert whole.data_ptr() == first
        assert torch.equal(whole, expected)


@torch.no_grad()
def test_small_linears_become_plain_ones_and_what_is_tied_stays_so(folder: Callable[..., Path]) -> None:
    path = folder(hidden_size=96, intermediate_size=64, tie_word_embeddings=True)
    model, own = read(path), plain(path)
    lay_out(model, joins=True)
    assert Widening.of(model) is None
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(IDS).logits, own(IDS).logits, rtol=1e-5, atol=1e-5)


def test_files_in_several_types_or_in_float32_are_read_in_full(folder: Callable[..., Path]) -> None:
    path = folder()
    assert stored_dtype(open_slices(path)) == torch.bfloat16
    weights = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = torch.linspace(0, 1, weights[name].numel()).view_as(weights[name])  # more than 16 bits can say
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert stored_dtype(open_slices(path)) is None
    module = read(path)
    assert Widening.of(module) is None
    assert torch.equal(module.get_submodule(name.removesuffix(".weight")).weight, weights[name])


def test_a_family_that_the_loop_does_not_compute_is_read_in_full(tmp_path: Path) -> None:
    settings = GPTNeoXConfig(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert stored_dtype(open_slices(tmp_path)) == torch.bfloat16
    assert Widening.of(read(tmp_path)) is None


def test_a_model_is_heard_reading_its_stored_weights_once(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder()
    model, read_by = read(path), []
    forward = StoredLinear.forward

    def counted(linear: StoredLinear, x: torch.Tensor) -> torch.Tensor:
        if not linear.gives_zeros:
            read_by.append(linear)
        return forward(linear, x)

    monkeypatch.setattr(StoredLinear, "forward", counted)
    reference = run_reference(model)
    linears = [each for each in model.modules() if isinstance(each, StoredLinear)]
    assert len(read_by) == len(linears) == len(set(map(id, read_by)))
    beside = run_reference(plain(path))
    assert reference.shape == beside.shape
    assert str(reference.scorings) == str(beside.scorings)
    torch.testing.assert_close(reference.logits, beside.logits)
    assert float(model(IDS).logits.abs().max()) > 0.0


def resident_bytes(file: Path) -> int:
    """Of a file's mappings in this process."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_ours = line.endswith(str(file))
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell of mappings")
@pytest.mark.parametrize("is_tied", [False, True])
def test_no_page_of_the_file_stays_for_what_is_laid_out(is_tied: bool, folder: Callable[..., Path]) -> None:
    path = folder(dtype=torch.float32, tie_word_embeddings=is_tied, num_hidden_layers=6)
    laid_out = load_model(config(path, device="cpu")).module
    file = path / "model.safetensors"
    embedding = 0 if is_tied else laid_out.get_input_embeddings().weight.nbytes
    small = sum(each.nbytes for each in laid_out.parameters()) - embedding
    assert resident_bytes(file) <= embedding + small + file.stat().st_size // 10
    assert packed_bytes(laid_out) > file.stat().st_size // 2
