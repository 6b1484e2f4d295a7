"""All private parts of torch that the service uses, seen in torch 2.13: operations for CPUs without a public name.

A build of torch may lack one. The call then raises AttributeError.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor


def lay_out(weight: Tensor, num_rows: int) -> Tensor:
    """Return a weight [outputs, inputs] as oneDNN reads it fastest for so many rows.

    The public `to_mkldnn` keeps the plain order.
    """
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), num_rows)
    return packed


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., inputs] times a weight that `lay_out` made, plus a bias [outputs]: [..., outputs]."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Where a weight that `lay_out` made is in memory."""

    address: int
    num_bytes: int


def memory_of(packed: Tensor) -> Memory | None:
    """Return where a weight that `lay_out` made lies; None where this build of torch does not tell."""
    try:
        onednn = torch.ops.mkldnn
        return Memory(address=onednn.data_ptr(packed), num_bytes=onednn._nbytes(packed))
    except AttributeError:
        return None


def onednn_has(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies 16 bits by instructions for them. `get_capabilities` knows the CPU alone."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def pack_int4(numbers: Tensor) -> Tensor:
    """Return numbers [outputs, inputs] from 0 to 15 as the kernel wants them, [outputs, inputs / 2] uint8."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.to(torch.int32), 1)
    return packed


def multiply_int4(x: Tensor, packed: Tensor, group: int, table: Tensor) -> Tensor:
    """Return x [rows, inputs] times what `pack_int4` made: [rows, outputs].

    table: scale and offset of each group of so many inputs, [groups, outputs, 2]
    """
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, table)
    return y


def quantised(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return numbers [outputs, inputs] int8 with scales [outputs] as one of torch's quantised tensors.

    The public `quantize_per_channel` would round numbers with fractions.
    """
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop its quantised tensors; this is the only way to pack one
        return torch._make_per_channel_quantized_tensor(numbers, scales.double(), zeros, 0)
