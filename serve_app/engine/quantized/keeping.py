"""Hands quantised weights to kernels in their stored form, if a kernel takes that form."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_app.engine.quantized.decoding import Parts, unpack_awq, unpack_gptq, unpack_words
from serve_app.engine.quantized.linear import GROUPS, MIDDLE, Int4Groups, Int8Rows


def keep_scaled(parts: Parts) -> Int8Rows | None:
    """int8 with one scale or one per output, and none but 0 stored as 0."""
    numbers = parts[".weight"]
    scales = parts.get(".weight_scale")
    if numbers.dtype != torch.int8 or scales is None or ".weight_zero_point" in parts:
        return None
    if scales.numel() not in (1, len(numbers)):
        return None
    return Int8Rows(numbers=numbers, scales=scales.float().flatten().expand(len(numbers)).contiguous())


def keep_bnb_int8(parts: Parts) -> Int8Rows:
    """bitsandbytes' LLM.int8()."""
    return Int8Rows(numbers=parts[".weight"], scales=parts[".SCB"].float() / 127)


def keep_packed(parts: Parts) -> Int4Groups | None:
    """compressed-tensors' pack-quantized in 4 bits, where groups are of inputs that lie side by side."""
    rows, columns = parts[".weight_shape"].tolist()
    packed = parts[".weight_packed"]
    if packed.shape[1] != -(-columns * 4 // 32) or ".weight_g_idx" in parts:
        return None
    scales = parts[".weight_scale"].float().reshape(rows, -1)
    zeros = torch.full_like(scales, MIDDLE)
    if ".weight_zero_point" in parts:
        zeros = unpack_words(parts[".weight_zero_point"].T.contiguous(), 4)[:, :rows].T.float()
    return _groups(unpack_words(packed, 4)[:, :columns], scales, zeros)


def keep_gptq(parts: Parts, *, zero_offset: int) -> Int4Groups | None:
    """GPTQ in 4 bits without act-order."""
    numbers, zeros = unpack_gptq(parts, bits=4, zero_offset=zero_offset)
    if ".g_idx" in parts:
        size = len(numbers) // len(zeros)
        if not torch.equal(parts[".g_idx"].long(), torch.arange(len(numbers)) // size):
            return None
    return _groups(numbers.T, parts[".scales"].float().T, zeros.T.float())


def keep_awq(parts: Parts) -> Int4Groups | None:
    """AWQ's gemm version."""
    numbers, zeros = unpack_awq(parts)
    return _groups(numbers.T, parts[".scales"].float().T, zeros.T.float())


def _groups(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Int4Groups | None:
    """(numbers - zeros) · scales, where groups have a size that the kernel takes."""
    size = numbers.shape[1] // scales.shape[1]
    if size not in GROUPS or size * scales.shape[1] != numbers.shape[1]:
        return None
    scales = scales.bfloat16()
    offsets = ((MIDDLE - zeros) * scales.float()).bfloat16()
    return Int4Groups(
        numbers=numbers.to(torch.uint8).contiguous(), scales=scales.contiguous(), offsets=offsets.contiguous()
    )
