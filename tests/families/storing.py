"""Stores a small model's weights in few bits, as the formats' authors do, and says which numbers are stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
GROUP = 8
AWQ_PACKING = (0, 2, 4, 6, 1, 3, 5, 7)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022833824, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One weight: the tensors of the file by the ending of their names, and the numbers that they mean."""

    tensors: Tensors
    means: Tensor


def store(folder: Path, out: Path, settings: dict[str, Any], pack: Callable[[Tensor], Stored], *, ending: str) -> Path:
    """Copy a model's folder with its layers' matrices packed; beside it, in `plain`, what they mean."""
    tensors = load_file(folder / "model.safetensors")
    packed, plain = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if "layers." in name and name.endswith(ending) and tensor.dim() > 1:
            stored = pack(tensor)
            stem = name.removesuffix(".weight")
            packed |= {stem + suffix: each.contiguous() for suffix, each in stored.tensors.items()}
            plain[name] = stored.means.contiguous()
        else:
            packed[name] = plain[name] = tensor
    for target, contents, extra in ((out, packed, {"quantization_config": settings}), (out / "plain", plain, {})):
        target.mkdir(parents=True)
        for file in folder.iterdir():
            if file.suffix == ".json":
                (target / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | extra))
        save_file(contents, target / "model.safetensors", metadata={"format": "pt"})
    return out


def fp8_blocks(weight: Tensor) -> Stored:
    """Blocks of 24 × 24, the last ones cut off."""
    rows, columns = (-(-size // 24) for size in weight.shape)
    scale, means = torch.empty(rows, columns), torch.empty_like(weight)
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            area = (slice(row * 24, row * 24 + 24), slice(column * 24, column * 24 + 24))
            scale[row, column] = weight[area].abs().max() / 448
            stored[area] = (weight[area] / scale[row, column]).to(torch.float8_e4m3fn)
            means[area] = stored[area].float() * scale[row, column]
    return Stored(tensors={".weight": stored, ".weight_scale_inv": scale}, means=means)


def fp8_whole(weight: Tensor) -> Stored:
    """One scale for all; a scale of activations is there too."""
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {".weight": stored, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}
    return Stored(tensors=tensors, means=stored.float() * scale)


def int8_rows(weight: Tensor) -> Stored:
    """A scale and a zero per row."""
    low, high = weight.min(1, keepdim=True).values, weight.max(1, keepdim=True).values
    scale = (high - low) / 255
    zero = (-128 - low / scale).round()
    stored = (weight / scale + zero).round().clamp(-128, 127)
    tensors = {".weight": stored.to(torch.int8), ".weight_scale": scale, ".weight_zero_point": zero.to(torch.int8)}
    return Stored(tensors=tensors, means=(stored - zero) * scale)


def int8_rows_around_zero(weight: Tensor) -> Stored:
    """A scale per row, less than all of the range used."""
    scale = weight.abs().amax(1, keepdim=True) / 100
    stored = (weight / scale).round()
    return Stored(tensors={".weight": stored.to(torch.int8), ".weight_scale": scale}, means=stored * scale)


def packed_int4(weight: Tensor, group: int = GROUP) -> Stored:
    """Signed numbers of four bits, groups of eight inputs, zeros packed along the outputs."""
    numbers, zeros, scale = _groups(weight, group)
    means = (numbers - zeros.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
    tensors = {
        ".weight_packed": _words(numbers),
        ".weight_zero_point": _words(zeros.T).T,
        ".weight_scale": scale,
        ".weight_shape": torch.tensor(weight.shape),
    }  # an offset of eight makes them signed: stored as they are
    return Stored(tensors=tensors, means=means)


def gptq_side_by_side(weight: Tensor, group: int = GROUP) -> Stored:
    """Without act-order. A zero is stored less one."""
    numbers, zeros, scale = _groups(weight, group)
    means = (numbers - zeros.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
    tensors = {".qweight": _words(numbers).T, ".qzeros": _words((zeros.T - 1) % 16), ".scales": scale.T}
    return Stored(tensors=tensors, means=means)


def gptq(weight: Tensor) -> Stored:
    """Inputs in an order of their own (act-order): a group is any eight of them. A zero is stored less one."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[0]))
    groups = torch.empty(weight.shape[1], dtype=torch.int32)
    groups[order] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    numbers, zeros, scale = _groups(weight[:, order])
    means = torch.empty_like(weight)
    means[:, order] = (numbers - zeros.repeat_interleave(GROUP, 1)) * scale.repeat_interleave(GROUP, 1)
    unordered = torch.empty_like(numbers)
    unordered[:, order] = numbers
    tensors = {
        ".qweight": _words(unordered).T,
        ".qzeros": _words((zeros.T - 1) % 16),
        ".scales": scale.T,
        ".g_idx": groups,
    }
    return Stored(tensors=tensors, means=means)


def awq(weight: Tensor, group: int = GROUP) -> Stored:
    numbers, zeros, scale = _groups(weight, group)
    means = (numbers - zeros.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
    order = torch.tensor(AWQ_PACKING)
    mixed, mixed_zeros = (each.T.unflatten(1, (-1, 8))[..., order].flatten(1) for each in (numbers, zeros))
    tensors = {".qweight": _words(mixed), ".qzeros": _words(mixed_zeros), ".scales": scale.T}
    return Stored(tensors=tensors, means=means)


def bnb_int8(weight: Tensor) -> Stored:
    largest = weight.abs().max(1).values
    stored = (weight * 127 / largest[:, None]).round()
    tensors = {".weight": stored.to(torch.int8), ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Stored(tensors=tensors, means=stored * largest[:, None] / 127)


def bnb_nf4(weight: Tensor) -> Stored:
    """Blocks of 64, whose largest values are quantised in turn, in blocks of 16, by a table of 256."""
    table = torch.tensor(NF4)
    blocks = weight.flatten().view(-1, 64)
    largest = blocks.abs().max(1).values
    offset = float(largest.mean())
    nested_table = torch.linspace(-1, 1, 256)
    pad = -len(largest) % 16
    nested = torch.nn.functional.pad(largest - offset, (0, pad)).view(-1, 16)
    nested_largest = nested.abs().max(1).values.clamp(min=1e-6)
    codes = (nested / nested_largest[:, None])[..., None].sub(nested_table).abs().argmin(-1).flatten()[: len(largest)]
    meant = nested_table[codes] * nested_largest.repeat_interleave(16)[: len(largest)] + offset
    entries = (blocks / meant[:, None])[..., None].sub(table).abs().argmin(-1).flatten()
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape),
        "nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset,
    }  # fmt: skip
    tensors = {
        ".weight": (entries[0::2] * 16 + entries[1::2]).to(torch.uint8)[:, None],
        ".weight.absmax": codes.to(torch.uint8),
        ".weight.quant_map": table,
        ".weight.nested_absmax": nested_largest,
        ".weight.nested_quant_map": nested_table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return Stored(tensors=tensors, means=(table[entries].view(-1, 64) * meant[:, None]).view(weight.shape))


def mxfp4(weight: Tensor) -> Stored:
    """Experts [experts, in, out]: blocks of 32 inputs share a power of two."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table])
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, out, blocks, 32]
    power = torch.floor(torch.log2(blocks.abs().amax(-1) / 4))
    entries = (blocks / torch.exp2(power)[..., None])[..., None].sub(table).abs().argmin(-1)
    means = (table[entries] * torch.exp2(power)[..., None]).flatten(2).transpose(1, 2)
    tensors = {
        "_blocks": (entries[..., 0::2] + entries[..., 1::2] * 16).to(torch.uint8),
        "_scales": (power + 127).to(torch.uint8),
    }
    return Stored(tensors=tensors, means=means)


def _groups(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers 0 … 15 [out, in], zeros and scales [out, groups]."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = (high - low) / 15
    zeros = (-low / scale).round().clamp(0, 15)
    numbers = (grouped / scale[..., None] + zeros[..., None]).round().clamp(0, 15)
    return numbers.flatten(1), zeros, scale


def _words(numbers: Tensor) -> Tensor:
    """Eight numbers of four bits to a word along the last dimension, the first in the lowest bits."""
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % 8)).long().unflatten(1, (-1, 8))
    words = (padded << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
