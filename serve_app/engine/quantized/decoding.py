"""Decodes the stored parts of a quantised weight to [out, in] float32, as each format's authors do."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]
"""The tensors of one weight by their endings."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the columns of eight lie in a word, lowest bits first
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign; the sign is the highest of four bits
E8M0_BIAS = 127


def decode_scaled(parts: Parts, *, block: tuple[int, int] | None = None) -> Tensor:
    """float8 or int8 times a scale: one for all, per output, per group of inputs, or per block.

    `.weight` [out, in]; `.weight_scale` or `.weight_scale_inv`; `.weight_zero_point` where 0 is not stored as 0.
    block: rows and columns that share a scale, where the last ones need not be whole; of a scale of another shape, what
        divides the weight by it

    Sources: compressed-tensors (int-, float- and naive-quantized), DeepSeek-V3's README_WEIGHTS.md.
    """
    weight = parts[".weight"].float()
    scale = parts[".weight_scale_inv"] if ".weight_scale_inv" in parts else parts[".weight_scale"]
    if ".weight_zero_point" in parts:
        weight = weight - _spread(parts[".weight_zero_point"].float(), weight.shape, block)
    return weight * _spread(scale.float(), weight.shape, block)


def decode_packed(parts: Parts) -> Tensor:
    """compressed-tensors' pack-quantized: signed numbers of 2, 4 or 8 bits in words along the inputs.

    `.weight_packed` [out, words] int32, each number with an offset of half its range; `.weight_shape`;
    `.weight_scale` [out, groups]; `.weight_zero_point` [words, groups], packed along the outputs;
    `.weight_g_idx` [in], the group of each input.
    """
    rows, columns = parts[".weight_shape"].tolist()
    packed = parts[".weight_packed"]
    bits = next((bits for bits in (2, 4, 8) if -(-columns * bits // 32) == packed.shape[1]), None)
    if bits is None:
        raise ValueError(f"{columns} numbers in {packed.shape[1]} words are not of 2, 4 or 8 bits")
    scale = parts[".weight_scale"].float().reshape(rows, -1)
    weight = unpack_words(packed, bits)[:, :columns].float() - (1 << (bits - 1))
    if ".weight_zero_point" in parts:
        zeros = unpack_words(parts[".weight_zero_point"].T.contiguous(), bits)[:, :rows].T - (1 << (bits - 1))
        weight = weight - _of_groups(zeros.float(), parts, columns)
    return weight * _of_groups(scale, parts, columns)


def decode_gptq(parts: Parts, *, bits: int, zero_offset: int) -> Tensor:
    """GPTQ: unsigned numbers in words along the inputs, a scale and a zero per group of inputs and output.

    `.qweight` [words, out]; `.qzeros` [groups, words]; `.scales` [groups, out]; `.g_idx` [in]
    zero_offset: what was taken from a zero before it was stored: 1 in AutoGPTQ's format, 0 in gptq_v2
    """
    weight, zeros = unpack_gptq(parts, bits=bits, zero_offset=zero_offset)
    weight, scales = weight.float(), parts[".scales"].float()
    if ".g_idx" in parts:
        groups = parts[".g_idx"].long()
    else:
        groups = torch.arange(len(weight)) // (len(weight) // len(scales))
    return ((weight - zeros.float()[groups]) * scales[groups]).T


def decode_awq(parts: Parts) -> Tensor:
    """AWQ's gemm version: numbers of 4 bits in words along the outputs, in an order of their own.

    `.qweight` [in, words]; `.qzeros` [groups, words]; `.scales` [groups, out]
    """
    scales = parts[".scales"].float()
    weight, zeros = (each.float() for each in unpack_awq(parts))
    size = len(weight) // len(scales)
    return ((weight - zeros.repeat_interleave(size, dim=0)) * scales.repeat_interleave(size, dim=0)).T


def decode_bnb_int8(parts: Parts) -> Tensor:
    """bitsandbytes' LLM.int8() (arXiv 2208.07339): a row's largest absolute value is 127."""
    return parts[".weight"].float() * parts[".SCB"].float()[:, None] / 127


def decode_bnb_4bit(parts: Parts) -> Tensor:
    """bitsandbytes' nf4 and fp4 (arXiv 2305.14314): an entry of a table, times the largest value of its block.

    `.weight` uint8, two entries per byte, the first in the high bits; `.absmax` per block, or, quantised in turn,
    bytes with a table, blocks and an offset of their own; `.quant_state…` is JSON in bytes.
    """
    [state] = [json.loads(bytes(value.tolist())) for name, value in parts.items() if ".quant_state." in name]
    packed = parts[".weight"].flatten()
    entries = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
    largest = parts[".weight.absmax"]
    if ".weight.nested_absmax" in parts:
        nested = parts[".weight.nested_absmax"].float().repeat_interleave(state["nested_blocksize"])[: len(largest)]
        largest = parts[".weight.nested_quant_map"].float()[largest.long()] * nested + state["nested_offset"]
    shape = state["shape"]
    count = torch.Size(shape).numel()
    scale = largest.float().repeat_interleave(state["blocksize"])[:count]
    return (parts[".weight.quant_map"].float()[entries[:count]] * scale).reshape(shape)


def decode_mxfp4(parts: Parts) -> Tensor:
    """gpt-oss's experts in MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 numbers with one power of two.

    `_blocks` [experts, out, blocks, 16] uint8, the first number in the low bits; `_scales` [experts, out, blocks]
    Returns [experts, in, out], as transformers keeps them.
    """
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    packed = parts["_blocks"]
    numbers = table[torch.stack([packed & 15, packed >> 4], dim=-1).long()].flatten(-2)  # [experts, out, blocks, 32]
    powers = torch.exp2(parts["_scales"].float() - E8M0_BIAS)
    return (numbers * powers[..., None]).flatten(2).transpose(1, 2).contiguous()


def unpack_gptq(parts: Parts, *, bits: int, zero_offset: int) -> tuple[Tensor, Tensor]:
    """Numbers [in, out] and zeros [groups, out] of the parts of `decode_gptq`, integers."""
    zeros = unpack_words(parts[".qzeros"], bits)[:, : parts[".scales"].shape[1]] + zero_offset
    return unpack_words(parts[".qweight"].T.contiguous(), bits).T, zeros & ((1 << bits) - 1)


def unpack_awq(parts: Parts) -> tuple[Tensor, Tensor]:
    """Numbers [in, out] and zeros [groups, out] of the parts of `decode_awq`, integers."""
    weight, zeros = (_reordered(unpack_words(parts[name], 4)) for name in (".qweight", ".qzeros"))
    return weight, zeros


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits along the last dimension of int32 words, lowest bits first: [rows, words · 32/bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _reordered(numbers: Tensor) -> Tensor:
    """AWQ's numbers in the order of their columns."""
    words: Tensor = numbers.unflatten(1, (-1, len(AWQ_ORDER)))
    return words[..., torch.tensor(AWQ_ORDER)].flatten(1)


def _of_groups(scale: Tensor, parts: Parts, columns: int) -> Tensor:
    """[out, groups] spread over the inputs."""
    if ".weight_g_idx" in parts:
        return scale[:, parts[".weight_g_idx"].long()]
    return _spread(scale, torch.Size((scale.shape[0], columns)), None)


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """A scale of one, of each row, of groups or blocks, as one of each number."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == 1:
        scale = scale[:, None]
    if block is None or scale.shape[-2:] != tuple(
        -(-size // each) for size, each in zip(shape[-2:], block, strict=True)
    ):
        if shape[-2] % scale.shape[-2] or shape[-1] % scale.shape[-1]:
            raise ValueError(f"scales of shape {list(scale.shape)} do not divide a weight of {list(shape)}")
        block = (shape[-2] // scale.shape[-2], shape[-1] // scale.shape[-1])
    wide = scale.repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
    return wide[..., : shape[-2], : shape[-1]]
