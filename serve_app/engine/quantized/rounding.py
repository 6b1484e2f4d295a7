"""Weights in few bits: what is stored of each, and how a weight is rounded to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

Bits: TypeAlias = Literal["int8", "int4"]
"""What `weights` of a model may be."""

LARGEST = 127
"""Of a number of eight bits; -128 is left out, so that a weight and its negative are rounded alike."""
MIDDLE = 8
STEPS = 15
GROUP = 32
"""Inputs that share a scale in four bits."""
CHUNK_ROWS = 8192
"""Outputs that are rounded at once: what that takes on the way is a few times their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Rows:
    """numbers · scales[:, None]

    numbers: [out, in] int8;  scales: [out] float32
    """

    numbers: Tensor
    scales: Tensor

    @property
    def weight(self) -> Tensor:
        """[out, in] float32"""
        return self.numbers.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Groups:
    """(numbers - 8) · scales + offsets, those of the group that an input is in.

    numbers: [out, in] uint8, 0 … 15;  scales, offsets: [out, groups] bfloat16
    """

    numbers: Tensor
    scales: Tensor
    offsets: Tensor

    @property
    def weight(self) -> Tensor:
        """[out, in] float32"""
        grouped: Tensor = self.numbers.unflatten(1, (self.scales.shape[1], -1)).float() - MIDDLE
        return (grouped * self.scales.float()[..., None] + self.offsets.float()[..., None]).flatten(1)


Rounded: TypeAlias = Int8Rows | Int4Groups
SomeRounded = TypeVar("SomeRounded", bound=Rounded)


def round_to_int8(weight: Tensor) -> Int8Rows:
    """The nearest numbers, where each output's largest becomes 127.

    weight: [out, in]
    """
    rounded = [_round_rows(rows) for rows in weight.split(CHUNK_ROWS)]
    return join(rounded)


def round_to_int4(weight: Tensor) -> Int4Groups:
    """The nearest numbers, where the least and the largest of each group of 32 inputs become 0 and 15.

    weight: [out, in], inputs a multiple of 32
    """
    rounded = [_round_groups(rows) for rows in weight.split(CHUNK_ROWS)]
    return join(rounded)


def join(parts: Sequence[SomeRounded]) -> SomeRounded:
    """Weights of the same inputs as one, whose outputs are theirs one behind the other; of int4 in equal groups."""
    if len(parts) == 1:
        return parts[0]
    kind = type(parts[0])
    return kind(**{each.name: torch.cat([getattr(part, each.name) for part in parts]) for each in fields(kind)})


def _round_rows(weight: Tensor) -> Int8Rows:
    weight = weight.float()
    scales = weight.abs().amax(1).div_(LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
    numbers = (weight / scales[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return Int8Rows(numbers=numbers.to(torch.int8), scales=scales)


def _round_groups(weight: Tensor) -> Int4Groups:
    grouped = weight.float().unflatten(1, (-1, GROUP))
    least, largest = grouped.aminmax(dim=2)
    scales = ((largest - least) / STEPS).clamp_min_(torch.finfo(torch.bfloat16).tiny).bfloat16()
    offsets = (least + MIDDLE * scales.float()).bfloat16()  # as kernels have them; numbers are the nearest to these
    numbers = (grouped - offsets.float()[..., None]).div_(scales.float()[..., None]).round_().add_(MIDDLE)
    return Int4Groups(numbers=numbers.clamp_(0, STEPS).to(torch.uint8).flatten(1), scales=scales, offsets=offsets)
