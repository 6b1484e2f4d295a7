"""Which tokens would continue a repetition, and how long a one: what DRY penalises."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as Items

from serve_app.core.request import DryParams

LARGEST_EXPONENT = 88.7228391  # ln of the largest float32, as llama.cpp bounds its exponent
LARGEST_PENALTY = 3e38


class Repeats:
    """Earlier places where what a growing list of tokens ends with occurs, too.

    For each position i that holds the same token as the end, the length of the longest common suffix of
    `tokens[: i + 1]` and of all tokens is known. Of the next end's matches each is one longer than the match before
    it, so a step costs one look at each earlier occurrence of the new token: linear in the window at worst. The
    first call computes the same numbers at once as the Z-function of the reversed window (Gusfield, "Algorithms on
    Strings, Trees and Sequences", 1997, 1.3), linear as well.
    """

    def __init__(self, params: DryParams) -> None:
        self._params = params
        self._breakers_by_last: dict[int, list[tuple[int, ...]]] = {}
        for breaker in params.breakers:
            if breaker:
                self._breakers_by_last.setdefault(breaker[-1], []).append(breaker)
        self._positions: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}  # match length by the position that it ends at
        self._num_taken = 0
        self._free_from = 0  # first position after the last breaker

    def catch_up(self, token_ids: Items[int]) -> None:
        """Take what `token_ids` has gained since the last call."""
        if self._num_taken == 0 and token_ids:
            self._begin(token_ids)
        for position in range(self._num_taken, len(token_ids)):
            self._take(token_ids, position)
        self._num_taken = len(token_ids)

    def penalties(self, token_ids: Items[int]) -> dict[int, float]:
        """What to take from the logit of each token that would continue a repetition.

        token_ids: as given to `catch_up` last
        """
        params = self._params
        penalties = {}
        for token_id, length in self._continuations(token_ids).items():
            exponent = length - params.allowed_length
            if params.base > 1.000001:
                exponent = min(exponent, int(LARGEST_EXPONENT / math.log(params.base)))
            penalties[token_id] = min(params.multiplier * params.base**exponent, LARGEST_PENALTY)
        return penalties

    def _continuations(self, token_ids: Items[int]) -> dict[int, int]:
        """The longest repeated run that each token would continue; only runs that are penalised."""
        begin = self._window_begin(len(token_ids))
        limit = len(token_ids) - max(begin, self._free_from)
        shortest = max(self._params.allowed_length, 1)
        longest: dict[int, int] = {}
        if limit < shortest:
            return longest
        for position, length in self._lengths.items():
            length = min(length, position - begin + 1, limit)
            candidate = token_ids[position + 1]
            if length >= max(shortest, longest.get(candidate, 0)) and not self._is_breaker(candidate):
                longest[candidate] = length
        return longest

    def _begin(self, token_ids: Items[int]) -> None:
        """Take all tokens at once; those before the window never matter."""
        begin = self._window_begin(len(token_ids))
        last = len(token_ids) - 1
        for position in range(begin, last + 1):
            self._positions.setdefault(token_ids[position], []).append(position)
        common = z_function(token_ids[begin:][::-1])
        self._lengths = {last - shift: length for shift, length in enumerate(common) if shift and length}
        ends = (end for end in range(last, begin - 1, -1) if self._ends_breaker(token_ids, end))
        self._free_from = next(ends, -1) + 1
        self._num_taken = len(token_ids)

    def _take(self, token_ids: Items[int], position: int) -> None:
        token_id = token_ids[position]
        earlier = self._positions.setdefault(token_id, [])
        first = bisect_left(earlier, self._window_begin(position + 1))
        before = self._lengths
        self._lengths = {place: before.get(place - 1, 0) + 1 for place in earlier[first:]}
        earlier.append(position)
        if self._ends_breaker(token_ids, position):
            self._free_from = position + 1

    def _window_begin(self, end: int) -> int:
        return 0 if self._params.window is None else max(0, end - self._params.window)

    def _ends_breaker(self, token_ids: Items[int], position: int) -> bool:
        return any(
            position + 1 >= len(breaker) and tuple(token_ids[position + 1 - len(breaker) : position + 1]) == breaker
            for breaker in self._breakers_by_last.get(token_ids[position], ())
        )

    def _is_breaker(self, token_id: int) -> bool:
        return (token_id,) in self._breakers_by_last.get(token_id, ())


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
