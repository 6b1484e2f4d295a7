"""Random numbers that are functions of where they are used, so that a draw never depends on what else runs."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SPREAD = 0xD1342543DE82EF95  # odd: no two counters meet


class Stream(IntEnum):
    """What a number is drawn for: two uses at one position never get the same number."""

    TOKEN = 0
    XTC = 1
    MIROSTAT = 2


def uniform(seed: int, *, prompt_index: int, sample: int, position: int, stream: Stream = Stream.TOKEN) -> float:
    """A number in [0, 1) with 53 random bits, decided by the five numbers alone.

    A chain of SplitMix64 finalisers (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    state = _mix(seed & MASK)
    for counter in (prompt_index, sample, position, stream):
        state = _mix(state + counter * SPREAD)
    return (state >> 11) * 2.0**-53


def pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the cumulated weights at one uniform per row; give columns, never one of weight 0.

    weights:  [rows, n] float64, not normalised, at least one positive in each row
    uniforms: [rows] float64 in [0, 1)
    """
    cumulated = torch.cumsum(weights, dim=-1)
    thresholds = uniforms * cumulated[:, -1]
    columns = torch.searchsorted(cumulated, thresholds[:, None], right=True)[:, 0]
    last_possible = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(columns, last_possible)


def _mix(value: int) -> int:
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
