"""The first tokens of a row in some order whose weights reach a bound, found without sorting the vocabulary.

A radix selection: the weights are added up by the upper 16 bits of what orders the tokens. The bin in which the sum
crosses the bound is the only one of interest; its tokens are told apart by their further bits until few are left, and
those are sorted. Whatever the values are, each token is looked at once per 16 bits at most.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

DIGIT_BITS = 16
NUM_BINS = 1 << DIGIT_BITS
MAX_SORTED = 4096


def keep_until(keys: Tensor, weights: Tensor, bounds: Tensor, *, ties: Tensor) -> Tensor:
    """Keep each row's first tokens whose weights reach its bound, the one that crosses it too; all if none does.

    keys:    [rows, n] float32 or float64, no -0.0; higher ones come first
    weights: [rows, n] float64, at least 0
    bounds:  [rows] float64
    ties:    [rows, n] float32, no -0.0: of equal keys the highest of these comes first, of equals the lowest column

    Returns [rows, n] float64: 1 is kept, 0 is not. Columns without weight may be either.
    """
    coarse = keys.float()
    bins = _falling_bits(coarse).bitwise_right_shift_(DIGIT_BITS).bitwise_and_(NUM_BINS - 1).long()
    reached = torch.cumsum(_sums(bins, weights), dim=-1)
    crossed = (reached < bounds[:, None]).sum(-1)
    kept = torch.gt(coarse, _highest_in(crossed)[:, None], out=torch.empty_like(coarse)).double()
    for row, place in enumerate(crossed.tolist()):
        if place < NUM_BINS:
            columns = torch.nonzero(bins[row] == place)[:, 0]
            missing = bounds[row] - (reached[row, place - 1] if place else 0.0)
            kept[row, _first(columns, (keys[row], ties[row]), weights[row], missing)] = 1.0
    return kept


def _first(columns: Tensor, orders: tuple[Tensor, ...], weights: Tensor, bound: Tensor) -> Tensor:
    """Those of the columns, [m] by rising number, that come before the bound is reached."""
    taken = []
    for order in orders:
        bits = _falling_bits(order[columns])
        for shift in range(torch.iinfo(bits.dtype).bits - DIGIT_BITS, -1, -DIGIT_BITS):
            if len(columns) <= MAX_SORTED or bool((bits == bits[0]).all()):
                break
            digits = (bits >> shift).bitwise_and_(NUM_BINS - 1).long()
            reached = torch.cumsum(_sums(digits[None], weights[columns][None])[0], dim=-1)
            place = int((reached < bound).sum())
            taken.append(columns[digits < place])
            bound = bound - reached[place - 1] if place else bound
            inside = digits == place
            columns, bits = columns[inside], bits[inside]
    if len(columns) <= MAX_SORTED:
        for order in reversed(orders):
            columns = columns[torch.sort(order[columns], descending=True, stable=True).indices]
    own = weights[columns]
    return torch.cat((*taken, columns[torch.cumsum(own, dim=-1) - own < bound]))


def _sums(bins: Tensor, weights: Tensor) -> Tensor:
    """Weights added up by bin; [rows, n] int64, [rows, n] float64 -> [rows, bins]"""
    sums = torch.zeros((len(bins), NUM_BINS), dtype=torch.float64, device=bins.device)
    return sums.scatter_add_(1, bins, weights)


def _falling_bits(values: Tensor) -> Tensor:
    """The bits of floats as integers that rise, read without a sign, as the floats fall."""
    integer, highest = (torch.int64, (1 << 63) - 1) if values.dtype is torch.float64 else (torch.int32, (1 << 31) - 1)
    bits = values.view(integer)
    flips = (bits >> (torch.iinfo(integer).bits - 1)).bitwise_not_().bitwise_and_(highest)
    return flips.bitwise_xor_(bits)


def _highest_in(places: Tensor) -> Tensor:
    """The highest float32 of each bin, -inf for one behind the last; [rows] int64 -> [rows]"""
    first = places << DIGIT_BITS
    bits = torch.where(first < 1 << 31, first ^ ((1 << 31) - 1), first - (1 << 32))
    values = bits.clamp(max=(1 << 31) - 1).int().view(torch.float32)
    return torch.where(places < NUM_BINS, values, -inf)
