"""Quantised checkpoints give what their numbers mean, or are refused by the name of their format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AwqConfig, BitsAndBytesConfig, FineGrainedFP8Config, GPTQConfig, Mxfp4Config

from serve_app.engine.decoder.config_check import check_config, weight_bytes
from serve_app.engine.decoder.loading import load_model, rehearse
from serve_app.engine.decoder.quantized_formats import decode_scaled, formats_of
from serve_app.engine.decoder.text_part import ModelNotSupported
from tests.engine.harness import complete, config, make_engine, request
from tests.families import storing
from tests.families.families import Family, family
from tests.families.making import save_config
from tests.families.test_parity import MAX_TOKENS, generate, make_prompts, whole_model

pytestmark = pytest.mark.slow

LLAMA = family("llama")
EXPERTS = family("qwen3_moe")
GPT_OSS = family("gpt_oss", "blocks of 32", hidden_size=32, intermediate_size=32)


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, **weights}}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


FORMATS: dict[str, tuple[Family, dict[str, Any], Callable[..., storing.Stored], str]] = {
    "fp8 in blocks": (
        LLAMA, {"quant_method": "fp8", "weight_block_size": [24, 24]}, storing.fp8_blocks, "proj.weight",
    ),
    "fp8 in blocks, experts": (
        EXPERTS, {"quant_method": "fp8", "weight_block_size": [24, 24]}, storing.fp8_blocks, "proj.weight",
    ),
    "fp8 with one scale": (LLAMA, {"quant_method": "fp8"}, storing.fp8_whole, "proj.weight"),
    "compressed-tensors float-quantized": (LLAMA, compressed("float-quantized"), storing.fp8_whole, "proj.weight"),
    "compressed-tensors int-quantized": (LLAMA, compressed("int-quantized"), storing.int8_rows, "proj.weight"),
    "compressed-tensors pack-quantized": (LLAMA, compressed("pack-quantized"), storing.packed_int4, "proj.weight"),
    "gptq with act-order": (LLAMA, {"quant_method": "gptq", "bits": 4}, storing.gptq, "proj.weight"),
    "awq": (LLAMA, {"quant_method": "awq", "bits": 4, "version": "gemm"}, storing.awq, "proj.weight"),
    "bitsandbytes int8": (LLAMA, {"load_in_8bit": True}, storing.bnb_int8, "proj.weight"),
    "bitsandbytes nf4": (LLAMA, {"quant_method": "bitsandbytes"}, storing.bnb_nf4, "proj.weight"),
    "mxfp4": (GPT_OSS, {"quant_method": "mxfp4"}, storing.mxfp4, "proj"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_gives_the_tokens_of_the_numbers_that_it_stores(
    name: str, model_folder: Callable[[Family], Path], tmp_path: Path
) -> None:
    of, settings, pack, ending = FORMATS[name]
    folder = store(model_folder(of), tmp_path / "stored", settings, pack, ending)
    own = whole_model(folder / "plain")
    assert rehearse(config(folder)).checked.formats
    engine = make_engine(config(folder))
    for key, expected in own.named_parameters():
        owner, _, leaf = key.rpartition(".")  # a linear that is joined with others still knows its own weight
        weight = getattr(engine.model.module.get_submodule(owner), leaf)
        torch.testing.assert_close(weight, expected.data, rtol=1e-5, atol=1e-6)
    prompts = make_prompts(seed=3)[1:3]
    outcomes = complete(engine, [(request(str(i), max_tokens=MAX_TOKENS), ids) for i, ids in enumerate(prompts)])
    assert [outcomes[str(i), 0].token_ids for i in range(2)] == [generate(own, ids) for ids in prompts]


def test_a_scale_of_another_shape_than_its_blocks_is_what_divides_the_weight() -> None:
    weight = torch.arange(32.0).view(4, 8).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    parts = {".weight": weight, ".weight_scale": scale}
    assert torch.equal(decode_scaled(parts, block=(2, 2)), weight.float() * scale)


def store(folder: Path, out: Path, settings: dict[str, Any], pack: Callable[..., storing.Stored], ending: str) -> Path:
    found = storing.store(folder, out, settings, pack, ending=ending)
    before, after = load_file(folder / "model.safetensors"), load_file(found / "plain" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before), "nothing was quantised"
    return found


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not supported"),
        ({"quant_method": "torchao"}, "quant_method 'torchao' is not supported"),
        ({"bits": 4}, "quant_method None is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits in checkpoint_format gptq is not supported"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq of 4 bits in version gemv"),
        (compressed("nvfp4-pack-quantized"), "compressed-tensors' format nvfp4-pack-quantized"),
        ({**compressed("int-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**compressed("int-quantized"), "quantization_status": "frozen"}, "quantization_status frozen"),
    ],
)
def test_another_format_is_refused_by_its_name_with_what_would_help(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_config("llama", {"quantization_config": settings}, tmp_path)
    assert reason in (told := refusal_of(tmp_path))
    assert "serve the checkpoint it was made from" in told


def test_numbers_without_a_scale_are_refused(model_folder: Callable[[Family], Path], tmp_path: Path) -> None:
    folder = store(model_folder(LLAMA), tmp_path / "stored", {"quant_method": "fp8"}, storing.fp8_whole, "proj.weight")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "layers.0.mlp.up_proj.weight is F8_E4M3, and no scale" in refusal_of(folder)


def test_scales_that_do_not_fit_are_refused(model_folder: Callable[[Family], Path], tmp_path: Path) -> None:
    folder = store(model_folder(LLAMA), tmp_path / "stored", {"quant_method": "fp8"}, storing.fp8_whole, "proj.weight")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(5, 7)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "mlp.up_proj.weight cannot be dequantised: scales of shape [5, 7]" in refusal_of(folder)


@pytest.mark.parametrize("lacks", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_checkpoint_that_lacks_a_weight_is_refused_and_not_filled_with_noise(
    lacks: str, model_folder: Callable[[Family], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "lacking"
    folder.mkdir()
    for file in model_folder(LLAMA).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    del tensors[lacks]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"1 weights are not in the checkpoint: {lacks}" in refusal_of(folder)


BNB_4BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").to_dict()
GROUP = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "block_structure": "24x24"}, "format": None}}


@pytest.mark.parametrize(
    ("written", "mains"),
    [
        (BNB_4BIT, {".weight"}),
        (BitsAndBytesConfig(load_in_8bit=True).to_dict(), {".weight"}),
        ({name: each for name, each in BNB_4BIT.items() if name != "quant_method"}, {".weight"}),
        (GPTQConfig(bits=4).to_dict(), {".qweight"}),
        ({"bits": 4, "group_size": 128, "desc_act": False, "damp_percent": 0.1}, {".qweight"}),
        (AwqConfig(bits=4).to_dict(), {".qweight"}),
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, {".qweight"}),
        (FineGrainedFP8Config().to_dict() | {"modules_to_not_convert": ["lm_head"]}, {".weight"}),
        ({"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}, {".weight"}),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []}, {".weight"}),
        ({"config_groups": GROUP, "format": "float-quantized", "ignore": ["lm_head"]}, {".weight_packed", ".weight"}),
        ({"quantization_config": compressed("int-quantized"), "sparsity_config": {}}, {".weight_packed", ".weight"}),
        (compressed("pack-quantized") | {"config_groups": {"W4A16": ["Linear"]}}, {".weight_packed", ".weight"}),
        (
            compressed("dense")
            | {"config_groups": {}, "kv_cache_scheme": {"num_bits": 8}, "quantization_status": None},
            {".weight_packed", ".weight"},
        ),
        (Mxfp4Config().to_dict(), {"_blocks"}),
    ],
)
def test_what_libraries_write_of_a_format_announces_it(written: dict[str, Any], mains: set[str]) -> None:
    written = json.loads(json.dumps(written, default=lambda each: getattr(each, "value", str(each))))
    assert {each.main for each in formats_of(written, "llama")} == mains


def refusal_of(folder: Path) -> str:
    """Return why loading refuses a folder, which the rehearsal of loading says in the same words."""
    told = []
    for attempt in (load_model, rehearse):
        with pytest.raises(ModelNotSupported) as refused:
            attempt(config(folder))
        told.append(str(refused.value))
    assert told[0] == told[1]
    return told[0]


def test_quantised_weights_are_counted_as_the_numbers_that_they_become(
    model_folder: Callable[[Family], Path], tmp_path: Path
) -> None:
    settings = {"quant_method": "gptq", "bits": 4}
    folder = store(model_folder(LLAMA), tmp_path / "stored", settings, storing.gptq, "proj.weight")
    plain = sum(each.numel() for each in load_file(folder / "plain" / "model.safetensors").values()) * 4
    found = weight_bytes(check_config(folder), torch.float32)
    assert plain <= found < 1.01 * plain  # beside what is stored there are the frequencies of positions
