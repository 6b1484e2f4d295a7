"""Random numbers as functions of where they are used, so that a draw never depends on what else runs.

A token is drawn by a race (Gumbel-max: Gumbel 1954; Maddison, Tarlow, Minka, "A* Sampling", 2014): each token's
log-weight gets noise of its own, a function of the key and the token's id, and the highest wins. Inverting a cumulated
sum would need one number only, but there the rounding errors of thousands of logits add up at every boundary: in
float32 about one draw in a thousand changed with the company a row was computed in. Here only a near tie of the two
best can change one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SPREAD = 0xD1342543DE82EF95  # odd: no two counters meet
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB


class Stream(IntEnum):
    """What a number is drawn for: two uses at one position never get the same number."""

    TOKEN = 0
    XTC = 1
    MIROSTAT = 2


def uniform(seed: int, *, prompt_index: int, sample: int, position: int, stream: Stream = Stream.TOKEN) -> float:
    """Return a number in [0, 1) with 53 random bits, decided by the five numbers alone."""
    return (key(seed, prompt_index=prompt_index, sample=sample, position=position, stream=stream) >> 11) * 2.0**-53


def key(seed: int, *, prompt_index: int, sample: int, position: int, stream: Stream = Stream.TOKEN) -> int:
    """Return 64 random bits, decided by the five numbers alone.

    A chain of SplitMix64 finalisers (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    state = _mix(seed & MASK)
    for counter in (prompt_index, sample, position, stream):
        state = _mix(state + counter * SPREAD)
    return state


def keys_tensor(keys: Sequence[int], device: torch.device) -> Tensor:
    """Return 64-bit keys as int64, the upper half as negative numbers."""
    return torch.tensor([_signed(value) for value in keys], dtype=torch.int64, device=device)


def pick(weights: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """Draw a column of each row with the probability of its weight; never one of weight 0.

    weights: [rows, n] float64, not normalised, at least one positive in each row
    ids:     [rows, n] or [n] int64, what each column is known by: its noise is the same wherever it stands
    keys:    [rows] int64
    Returns [rows] columns.
    """
    return torch.argmax(torch.log(weights) + gumbel(keys, ids), dim=-1)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Return standard Gumbel noise for each id under each row's key; [rows], [rows, n] or [n] -> [rows, n] float64."""
    state = keys[:, None] + ids * _signed(SPREAD) + _signed(GOLDEN)
    state = (state ^ _shifted(state, 30)) * _signed(FIRST_FACTOR)
    state = (state ^ _shifted(state, 27)) * _signed(SECOND_FACTOR)
    state = state ^ _shifted(state, 31)
    uniforms = (_shifted(state, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniforms))


def _mix(value: int) -> int:
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * FIRST_FACTOR) & MASK
    value = ((value ^ (value >> 27)) * SECOND_FACTOR) & MASK
    return value ^ (value >> 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shift to the right without the sign, which int64's own shift keeps."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
