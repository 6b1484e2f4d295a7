"""Products with weights of four bits, in bfloat16 with sums in float32, by torch's kernel for few rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from serve_app.engine.decoder.errors import ModelNotSupported
from serve_app.engine.quantized.rounding import GROUP, MIDDLE, Int4Groups

GROUPS = (32, 64, 128, 256)
"""Sizes that the kernel takes."""
BULK_ROWS = 64
"""From so many rows on the weight becomes plain numbers for one product: the kernel takes a time per row."""
PADDED = 64
"""Outputs are filled up to a multiple, so that all lie in whole blocks."""
BULK_OUTPUTS = 2048
"""Of a weight that are plain at once."""


class GroupsKernel:
    """torch's `_weight_int4pack_mm_for_cpu`; a row's result is the same in any company of fewer than 64 rows."""

    def __init__(self, groups: Int4Groups) -> None:
        self._outputs, self._inputs = groups.numbers.shape
        self._group = self._inputs // groups.scales.shape[1]
        self._block = block_of()
        more = -self._outputs % PADDED
        numbers = torch.nn.functional.pad(groups.numbers, (0, 0, 0, more), value=MIDDLE)
        table = torch.stack([groups.scales, groups.offsets], dim=2)
        self._table = torch.nn.functional.pad(table, (0, 0, 0, 0, 0, more)).transpose(0, 1).contiguous()
        self._packed = _pack(numbers)

    @property
    def stored(self) -> Int4Groups:
        """What it was made of, unpacked."""
        numbers = _unpack(self._packed, self._block).T[: self._outputs].contiguous()
        scales, offsets = self._table.transpose(0, 1)[: self._outputs].unbind(2)
        return Int4Groups(numbers=numbers, scales=scales.contiguous(), offsets=offsets.contiguous())

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [rows, in];  bias: [out] float32. Returns [rows, out], of the inputs' type."""
        y = self._multiply(x.bfloat16()) if len(x) < BULK_ROWS else self._multiply_plain(x.bfloat16())
        y = y[:, : self._outputs]
        return (y if bias is None else y.float().add_(bias)).to(x.dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, self._group, self._table)
        return y

    def _multiply_plain(self, x: Tensor) -> Tensor:
        """The same but for the order of sums."""
        rows = x.float()
        return torch.cat([(rows @ plain).bfloat16() for plain in self._plain()], dim=1)

    def _plain(self) -> Iterator[Tensor]:
        """The weight in pieces, [in, some outputs] float32."""
        for begin in range(0, len(self._packed), BULK_OUTPUTS):
            end = begin + BULK_OUTPUTS
            numbers = _unpack(self._packed[begin:end], self._block)
            scales, offsets = self._table[:, begin:end].float().unbind(2)
            grouped = numbers.float().sub_(MIDDLE).unflatten(0, (-1, self._group))
            plain: Tensor = grouped.mul_(scales[:, None]).add_(offsets[:, None])
            yield plain.flatten(0, 1)


def check_fits(name: str, outputs: int, inputs: int) -> None:
    """Raise ModelNotSupported where the kernel takes no weight of this shape."""
    if inputs % GROUP:
        raise ModelNotSupported(
            f"weights: int4 takes groups of {GROUP} inputs, which do not divide the {inputs} of {name}"
            f" [{outputs}, {inputs}]; use int8, or leave weights out"
        )


@functools.cache
def block_of() -> int:
    """How many outputs the kernel of this CPU packs together, as seen by what it packs. Raises ModelNotSupported."""
    numbers = (torch.arange(PADDED)[:, None] * 7 + torch.arange(GROUP) * 5).remainder(16).to(torch.uint8)
    try:
        packed = _pack(numbers)
    except (RuntimeError, AttributeError) as error:
        raise ModelNotSupported(f"weights: int4 has no kernel on this CPU: {error}") from error
    for block in (32, 64):
        if torch.equal(_unpack(packed, block).T, numbers):
            return block
    raise ModelNotSupported("weights: int4 is packed on this CPU in an order that is not known; use int8")


def _pack(numbers: Tensor) -> Tensor:
    """[out, in] as the kernel wants them: two numbers in a byte, [out, in / 2] uint8."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.to(torch.int32), 1)
    return packed


def _unpack(packed: Tensor, block: int) -> Tensor:
    """What was packed, [in, out] uint8: a byte has one output's number, and above it that of half a block later."""
    lanes = packed.view(torch.uint8).view(-1, packed.shape[1] * 2, block // 2)  # [blocks, in, half of a block]
    return torch.cat([lanes & 15, lanes >> 4], dim=2).transpose(0, 1).flatten(1)
