"""The first tokens of a row in some order whose weights reach a bound, found without sorting the vocabulary.

A radix selection: the weights are added up by the upper 16 bits of what orders the tokens, and those of the bin in
which the sum crosses the bound by the lower 16. That names the one float32 at which the bound is crossed; the tokens
that have it are told apart by what is finer, or by their ids. Whatever the values are, the work is the same few passes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.sampling.scratch import Scratch

DIGIT_BITS = 16
NUM_BINS = 1 << DIGIT_BITS
HALF = NUM_BINS // 2
MAX_SORTED = 4096
LEAST = 5e-324  # the smallest positive float64


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a sum over falling keys reaches its bound: at the tokens of key `value`, which are to bring `missing`."""

    value: float
    missing: float


def keep_until(keys: Tensor, weights: Tensor, bound: float, *, ties: Tensor | None, scratch: Scratch) -> Tensor:
    """Keep a row's first tokens whose weights reach the bound, the one that crosses it too; all if none does.

    The first one with a weight is always kept.

    keys:    [1, n] float32 or float64, no -0.0 beside 0.0; higher ones come first
    weights: [1, n] float64, at least 0
    ties:    [1, n] float32, no -0.0: of equal keys the highest of these comes first; None where equal keys are equal
             in all. Of equals the lowest column comes first.

    Returns [1, n] float64, scratch's "mask": 1 is kept, 0 is not. Columns without weight may be either.
    """
    bound = max(bound, LEAST)
    coarse = keys if keys.dtype is torch.float32 else scratch.copy("coarse", keys, torch.float32)
    crossing = _crossing(coarse, weights, bound, scratch)
    mask = scratch.take("mask", keys, torch.float64)
    if crossing is None:
        return mask.fill_(1.0)
    mask.copy_(torch.gt(coarse, crossing.value, out=scratch.take("compared", coarse, torch.float32)))
    is_tied = torch.eq(coarse, crossing.value, out=scratch.take("compared", coarse, torch.float32))
    if ties is None:
        return mask.add_(_first_columns(is_tied, weights, crossing.missing, scratch))
    columns = torch.nonzero(is_tied[0])[:, 0]
    mask[0, _first(columns, (keys[0], ties[0]), weights[0], crossing.missing)] = 1.0
    return mask


def _crossing(keys: Tensor, weights: Tensor, bound: float, scratch: Scratch) -> Crossing | None:
    """None where all weights together do not reach the bound; [1, n] float32, [1, n] float64"""
    digits = keys.view(torch.int16).unflatten(-1, (-1, 2))  # lower half first
    bins = _bins(digits[..., 1], scratch)
    sums = _sums(bins, weights, scratch)
    upper, missing = _place(torch.cat((sums[HALF:].flip(0), sums[:HALF])), bound)
    if upper == NUM_BINS:
        return None
    own_bin = NUM_BINS - 1 - upper if upper < HALF else upper - HALF
    inside = scratch.copy("inside", bins[None], torch.float64).sub_(own_bin).eq_(0.0).mul_(weights)
    sums = _sums(_bins(digits[..., 0], scratch), inside, scratch)
    rising = torch.cat((sums[HALF:], sums[:HALF]))
    falling = rising.flip(0) if upper < HALF else rising  # a negative float falls as its bits rise
    lower, missing = _place(falling, min(missing, float(torch.cumsum(falling, dim=-1)[-1])))
    low_bits = NUM_BINS - 1 - lower if upper < HALF else lower
    bits = ((own_bin - HALF) & (NUM_BINS - 1)) << DIGIT_BITS | low_bits
    return Crossing(struct.unpack("<f", struct.pack("<I", bits))[0], missing)


def _bins(digits: Tensor, scratch: Scratch) -> Tensor:
    """[1, n] int16 -> [n] int64 in [0, NUM_BINS)"""
    return scratch.take("bins", digits[0], torch.int64).copy_(digits[0]).add_(HALF)


def _sums(bins: Tensor, weights: Tensor, scratch: Scratch) -> Tensor:
    """Weights added up by bin; [n], [1, n] -> [NUM_BINS] float64"""
    sums = scratch.of_size("sums", NUM_BINS, torch.float64, bins.device)
    return sums.zero_().scatter_add_(0, bins, weights.view(-1))


def _place(sums: Tensor, bound: float) -> tuple[int, float]:
    """Of the first sum with which the total reaches the bound, and what the bound is without those before it."""
    reached = torch.cumsum(sums, dim=-1)
    place = int((reached < bound).sum())
    return place, bound - float(reached[place - 1]) if place else bound


def _first_columns(is_tied: Tensor, weights: Tensor, missing: float, scratch: Scratch) -> Tensor:
    """Of the tied ones those before which the sum has not reached what is missing; [1, n] float64, 1 or 0"""
    tied = scratch.copy("inside", is_tied, torch.float64)
    own = torch.mul(tied, weights, out=scratch.take("own", weights, torch.float64))
    before = torch.cumsum(own, dim=-1, out=scratch.take("before", weights, torch.float64)).sub_(own)
    return before.lt_(missing).mul_(tied)


def _first(columns: Tensor, orders: tuple[Tensor, ...], weights: Tensor, bound: float) -> Tensor:
    """Those of the columns, [m] by rising number, that come before the bound is reached."""
    taken = []
    for order in orders:
        values = order[columns]
        if len(columns) <= MAX_SORTED or bool(values.amin() == values.amax()):
            continue
        bits = _falling_bits(values)
        for shift in range(torch.iinfo(bits.dtype).bits - DIGIT_BITS, -1, -DIGIT_BITS):
            digits = (bits >> shift).bitwise_and_(NUM_BINS - 1).long()
            sums = torch.zeros(NUM_BINS, dtype=torch.float64, device=bits.device)
            place, bound = _place(sums.scatter_add_(0, digits, weights[columns]), bound)
            taken.append(columns[digits < place])
            inside = digits == place
            columns, bits = columns[inside], bits[inside]
    if len(columns) <= MAX_SORTED:
        for order in reversed(orders):
            columns = columns[torch.sort(order[columns], descending=True, stable=True).indices]
    own = weights[columns]
    return torch.cat((*taken, columns[torch.cumsum(own, dim=-1) - own < bound]))


def _falling_bits(values: Tensor) -> Tensor:
    """The bits of floats as integers that rise, read without a sign, as the floats fall."""
    integer, highest = (torch.int64, (1 << 63) - 1) if values.dtype is torch.float64 else (torch.int32, (1 << 31) - 1)
    bits = values.view(integer)
    flips = (bits >> (torch.iinfo(integer).bits - 1)).bitwise_not_().bitwise_and_(highest)
    return flips.bitwise_xor_(bits)
