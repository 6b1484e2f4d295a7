"""What a checkpoint stores in few bits is given to a kernel as it is stored, where its form is a kernel's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from serve_app.engine.decoder.config_check import check_config
from serve_app.engine.decoder.loading import read_module
from serve_app.engine.decoder.quantized_formats import (
    Grouped,
    keep_bnb_int8,
    keep_scaled,
    read_awq,
    read_gptq,
    read_packed,
)
from serve_app.engine.decoder.quantized_linear import Int4Groups, Int8Rows, QuantisedLinear, Rounded
from tests.engine.harness import config
from tests.families import storing
from tests.families.families import family
from tests.families.making import save_model
from tests.families.test_quantized import compressed, store

Keep = Callable[[storing.Tensors], Rounded | None]
WEIGHT = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("stored", "keep"),
    [(storing.int8_rows_around_zero, keep_scaled), (storing.bnb_int8, keep_bnb_int8)],
)
def test_eight_bits_are_kept_as_they_are(stored: Callable[..., storing.Stored], keep: Keep) -> None:
    found = stored(WEIGHT)
    kept = keep(found.tensors)
    assert isinstance(kept, Int8Rows)
    assert torch.equal(kept.numbers, found.tensors[".weight"])
    torch.testing.assert_close(kept.weight, found.means)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    ("stored", "read"),
    [
        (storing.packed_int4, read_packed),
        (storing.gptq_side_by_side, partial(read_gptq, bits=4, zero_offset=1)),
        (storing.awq, read_awq),
    ],
)
def test_four_bits_are_kept_but_for_scales_of_sixteen_bits(
    stored: Callable[..., storing.Stored], read: Callable[[storing.Tensors], Grouped], group: int
) -> None:
    found = stored(WEIGHT, group)
    kept = read(found.tensors).kept
    assert isinstance(kept, Int4Groups)
    assert kept.scales.shape == (48, 128 // group)
    step = float(kept.scales.float().max())
    assert float((kept.weight - found.means).abs().max()) < 0.05 * step  # numbers and zeros are the same
    torch.testing.assert_close(kept.weight, found.means, rtol=2**-7, atol=0.05 * step)


@pytest.mark.parametrize(
    ("found", "keep"),
    [
        (storing.int8_rows(WEIGHT), keep_scaled),  # zeros that are not 0
        (storing.fp8_whole(WEIGHT), keep_scaled),
        (storing.packed_int4(WEIGHT), lambda parts: read_packed(parts).kept),  # groups of eight
        (storing.gptq(WEIGHT), lambda parts: read_gptq(parts, bits=4, zero_offset=1).kept),  # act-order
        (storing.awq(WEIGHT), lambda parts: read_awq(parts).kept),
    ],
)
def test_what_no_kernel_computes_with_is_not_kept(found: storing.Stored, keep: Keep) -> None:
    assert keep(found.tensors) is None


def test_a_checkpoint_in_eight_bits_is_not_rounded_once_more(tmp_path: Path) -> None:
    of = family("llama")
    save_model(of.name, of.settings, tmp_path / "full")
    stored = storing.int8_rows_around_zero
    folder = store(tmp_path / "full", tmp_path / "stored", compressed("int-quantized"), stored, "proj.weight")
    tensors = load_file(folder / "model.safetensors")
    module = read_module(config(folder, weights="int8"), check_config(folder), torch.float32)
    kept = {name: each for name, each in module.named_modules() if isinstance(each, QuantisedLinear)}
    assert len(kept) == 2 * 7 + 1
    for name, linear in kept.items():
        if f"{name}.weight_scale" in tensors:
            assert torch.equal(linear.stored.numbers, tensors[f"{name}.weight"])
