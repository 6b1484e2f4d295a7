"""The first tokens of a row in some order whose weights reach a bound, found without sorting the vocabulary.

A radix selection: the weights are added up by the upper 16 bits of what orders the tokens. That names the bin of
floats among which the bound is crossed. Its tokens, few as a rule, are sorted; where they are many, they are told apart
by their other bits in the same way, or by their ids alone where they are equal. Whatever the values are, the work is
the same few passes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import copysign, inf, isnan

import torch
from torch import Tensor

from serve_app.engine.sampling.scratch import Scratch

DIGIT_BITS = 16
NUM_BINS = 1 << DIGIT_BITS
HALF = NUM_BINS // 2
MAX_SORTED = 4096
LEAST = 5e-324  # the smallest positive float64


@dataclass(frozen=True, slots=True)
class Bin:
    """The floats, all with the same upper bits, among which a sum over falling keys reaches its bound.

    lowest, highest: of the bin;  missing: what its tokens are to bring
    """

    lowest: float
    highest: float
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
    orders = (keys,) if ties is None else (keys, ties)
    mask = scratch.take("mask", keys, torch.float64)
    if all(_is_level(order) for order in orders):
        return _first_columns(mask.fill_(1.0), weights, bound, scratch)
    coarse = keys if keys.dtype is torch.float32 else scratch.copy("coarse", keys, torch.float32)
    found = _crossing(coarse, weights, bound, scratch)
    if found is None:
        return mask.fill_(1.0)
    above = torch.gt(coarse, found.highest, out=scratch.take("compared", coarse, torch.float32))
    inside = torch.ge(coarse, found.lowest, out=scratch.take("inside", coarse, torch.float32)).sub_(above)
    mask.copy_(above)
    columns = torch.nonzero(inside[0])[:, 0]
    if len(columns) > MAX_SORTED and all(_is_level(order[:, columns]) for order in orders):
        return mask.add_(_first_columns(scratch.copy("tied", inside, torch.float64), weights, found.missing, scratch))
    mask[0, _first(columns, tuple(order[0] for order in orders), weights[0], found.missing)] = 1.0
    return mask


def _is_level(values: Tensor) -> bool:
    """Whether all are the same; [1, n]"""
    ends = values[0, :: max(1, values.shape[-1] - 1)]
    return bool(ends[0] == ends[-1]) and bool(values.amin() == values.amax())


def _crossing(keys: Tensor, weights: Tensor, bound: float, scratch: Scratch) -> Bin | None:
    """None where all weights together do not reach the bound; [1, n] float32, [1, n] float64"""
    digits = scratch.take("digits", keys, torch.int32)
    torch.bitwise_right_shift(keys.view(torch.int32), DIGIT_BITS, out=digits).add_(HALF)
    sums = scratch.of_size("sums", NUM_BINS, torch.float64, keys.device)
    sums.zero_().scatter_add_(0, scratch.copy("bins", digits, torch.int64)[0], weights[0])
    place, missing = _place(torch.cat((sums[HALF:].flip(0), sums[:HALF])), bound)
    if place == NUM_BINS:
        return None
    is_positive = place < HALF
    upper = (HALF - 1 - place) if is_positive else place
    ends = sorted(_float_of(upper << DIGIT_BITS | low) for low in (0, NUM_BINS - 1))
    return Bin(ends[0], ends[1], missing)


def _float_of(bits: int) -> float:
    """The float of 32 bits; infinity where they are no number's."""
    found: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return copysign(inf, found) if isnan(found) else found


def _place(sums: Tensor, bound: float) -> tuple[int, float]:
    """Of the first sum with which the total reaches the bound, and what the bound is without those before it."""
    reached = torch.cumsum(sums, dim=-1)
    place = int(torch.searchsorted(reached, bound))
    return place, bound - float(reached[place - 1]) if place else bound


def _first_columns(tied: Tensor, weights: Tensor, missing: float, scratch: Scratch) -> Tensor:
    """Of the tied ones those before which the sum has not reached what is missing.

    tied: [1, n] float64, 1 or 0, which is overwritten with what is returned
    """
    own = torch.mul(tied, weights, out=scratch.take("own", weights, torch.float64))
    before = torch.cumsum(own, dim=-1, out=scratch.take("before", weights, torch.float64)).sub_(own)
    return tied.mul_(before.lt_(missing))


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
