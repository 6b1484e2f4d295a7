"""Which tokens would continue a repetition, and how long a one: what DRY penalises."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from serve_app.core.request import DryParams

LARGEST_EXPONENT = 88.7228391  # ln of the largest float32, as llama.cpp bounds its exponent
LARGEST_PENALTY = 3e38
LEAST_ROOM = 256


class Repeats:
    """Earlier places where what a growing list of tokens ends with occurs, too.

    For each distance d from the end, the length of the longest common suffix of all tokens and of all but the last d
    is known. A match keeps its distance while it lasts, so a token makes each of them one longer or ends it: one pass
    over the window for a whole tensor, the same for any text. The first call computes the same numbers at once as the
    Z-function of the reversed window (Gusfield, "Algorithms on Strings, Trees and Sequences", 1997, 1.3).
    """

    def __init__(self, params: DryParams) -> None:
        self._params = params
        self._breakers_by_last: dict[int, list[tuple[int, ...]]] = {}
        for breaker in params.breakers:
            if breaker:
                self._breakers_by_last.setdefault(breaker[-1], []).append(breaker)
        self._lonely_breakers = torch.tensor([breaker[0] for breaker in params.breakers if len(breaker) == 1]).long()
        self._newest_first = torch.empty(0, dtype=torch.int32)  # room before `_head`, then the tokens
        self._head = 0
        self._lengths = torch.empty(0, dtype=torch.int32)  # of the match at distance 1, 2, ...
        self._num_taken = 0
        self._free_from = 0  # first position after the last breaker

    def catch_up(self, token_ids: Items[int]) -> None:
        """Take what `token_ids` has gained since the last call."""
        if self._num_taken == 0 and token_ids:
            self._begin(token_ids)
        for position in range(self._num_taken, len(token_ids)):
            self._take(token_ids, position)
        self._num_taken = len(token_ids)

    def penalties(self) -> tuple[Tensor, Tensor]:
        """What to take from the logit of each token that would continue a repetition; [n] int64, [n] float64"""
        params = self._params
        token_ids, lengths = self._continuations()
        exponents = (lengths - params.allowed_length).double()
        if params.base > 1.000001:
            exponents.clamp_(max=int(LARGEST_EXPONENT / math.log(params.base)))
        charged = params.multiplier * torch.pow(params.base, exponents)
        return token_ids, charged.clamp_(max=LARGEST_PENALTY)

    def _continuations(self) -> tuple[Tensor, Tensor]:
        """Tokens that would continue repeated runs, and the longest run of each; only runs that are penalised."""
        begin = self._window_begin(self._num_taken)
        size = self._num_taken - begin
        limit = self._num_taken - max(begin, self._free_from)
        shortest = max(self._params.allowed_length, 1)
        if limit < shortest or size < 2:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        matched = self._lengths[: size - 1]
        if int(matched.amax()) < shortest:  # as in ordinary text
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        distances = torch.nonzero(matched >= shortest)[:, 0] + 1
        lengths = torch.minimum(matched[distances - 1].long(), size - distances).clamp_(max=limit)
        distances, lengths = distances[lengths >= shortest], lengths[lengths >= shortest]
        token_ids = self._newest_first[self._head + distances - 1].long()
        return self._longest(token_ids, lengths)

    def _longest(self, token_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Each token once, with its greatest length; those that are breakers left out."""
        if not len(token_ids):
            return token_ids, lengths
        ranks = (lengths << 32) + torch.arange(len(lengths))  # no two are equal
        best = torch.zeros(int(token_ids.max()) + 1, dtype=torch.int64).scatter_reduce_(0, token_ids, ranks, "amax")
        best[self._lonely_breakers[self._lonely_breakers < len(best)]] = 0
        chosen = torch.nonzero(best[token_ids] == ranks)[:, 0]
        return token_ids[chosen], lengths[chosen]

    def _begin(self, token_ids: Items[int]) -> None:
        """Take all tokens at once; those before the window never matter."""
        begin = self._window_begin(len(token_ids))
        recent = token_ids[begin:][::-1]
        self._newest_first = torch.tensor(recent, dtype=torch.int32)
        self._lengths = torch.tensor(z_function(recent)[1:], dtype=torch.int32)
        last = len(token_ids) - 1
        ends = (end for end in range(last, begin - 1, -1) if self._ends_breaker(token_ids, end))
        self._free_from = next(ends, -1) + 1
        self._num_taken = len(token_ids)

    def _take(self, token_ids: Items[int], position: int) -> None:
        token_id = token_ids[position]
        earlier = self._newest_first[self._head :]
        if self._params.window is not None:
            earlier = earlier[: max(0, self._params.window - 1)]
        self._make_room(len(earlier))
        lengths = self._lengths[: len(earlier)]
        lengths.add_(1).mul_(torch.eq(earlier, token_id, out=torch.empty_like(earlier)))  # numbers cost less than bools
        self._head -= 1
        self._newest_first[self._head] = token_id
        if self._ends_breaker(token_ids, position):
            self._free_from = position + 1

    def _make_room(self, num_earlier: int) -> None:
        """For one more token in front, and a length for each earlier one: twice the memory where there is none."""
        if self._head == 0:
            known = self._newest_first[:num_earlier]
            self._head = max(len(known), LEAST_ROOM)
            self._newest_first = torch.cat((torch.zeros(self._head, dtype=torch.int32), known))
        if len(self._lengths) < num_earlier:
            more = torch.zeros(max(num_earlier, LEAST_ROOM), dtype=torch.int32)
            self._lengths = torch.cat((self._lengths, more))

    def _window_begin(self, end: int) -> int:
        return 0 if self._params.window is None else max(0, end - self._params.window)

    def _ends_breaker(self, token_ids: Items[int], position: int) -> bool:
        return any(
            position + 1 >= len(breaker) and tuple(token_ids[position + 1 - len(breaker) : position + 1]) == breaker
            for breaker in self._breakers_by_last.get(token_ids[position], ())
        )


def z_function(items: Items[int]) -> list[int]:
    """For each place the length of the longest common prefix of `items` and of `items[place:]`; 0 for place 0."""
    size = len(items)
    lengths = [0] * size
    left = right = 0  # the known match that reaches farthest is items[left:right]
    for place in range(1, size):
        length = min(right - place, lengths[place - left]) if place < right else 0
        while place + length < size and items[length] == items[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return lengths
