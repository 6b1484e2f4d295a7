"""A row of few values, each with all tokens that have it: what bfloat16 leaves of a vocabulary is a few thousand."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from serve_app.engine.sampling.full import FullRow
from serve_app.engine.sampling.racing import Left
from serve_app.engine.sampling.scratch import Scratch
from serve_app.engine.sampling.selection import LEAST
from serve_app.kernels.forms import Counted, InPlay

if TYPE_CHECKING:
    from serve_app.kernels.cpu.vocabulary import VocabularyKernels


class LevelRow:
    """A row on its way through the chain, as `FullRow` is, said of levels: the tokens that have one value each.

    logits:  [1, n] float32 by falling value
    scaled:  [1, n] float64, divided by the temperatures so far; -inf what was dropped from above others
    kept:    [1, n] float64, how many tokens of a level are in play: those with the lowest ids behind the skipped ones
    divisor: [1] float64
    """

    def __init__(self, kernels: VocabularyKernels, row: Tensor, counted: Counted) -> None:
        """row: [vocab], whose values were counted"""
        values, numbers = counted.values, counted.numbers
        if len(counted.others):
            own, repeats = torch.unique(row[counted.others], return_counts=True)
            is_finite = own > -inf
            values, order = torch.sort(torch.cat((values, own[is_finite])), descending=True)
            numbers = torch.cat((numbers, repeats[is_finite]))[order]
        self._kernels = kernels
        self._row = row
        self._numbers = numbers
        self._skipped = torch.zeros_like(numbers)
        self.scratch = Scratch()
        self.logits = values[None]
        self.scaled = values.double()[None]
        self.kept = numbers.double()[None]
        self.divisor = torch.ones(1, dtype=torch.float64)
        self._weights: Tensor | None = None

    @property
    def highest(self) -> Tensor:
        """[1] the highest scaled logit in play."""
        return self.scaled.amax(-1)

    @property
    def num_kept(self) -> Tensor:
        """[1] float64"""
        return _sum(self.kept)

    @property
    def weights(self) -> Tensor:
        """[1, n] float64, of each level's tokens together"""
        if self._weights is None:
            self._weights = torch.exp(self.scaled - self.highest[:, None]).mul_(self.kept)
        return self._weights

    @property
    def log_total(self) -> Tensor:
        """[1] ln of the sum of exponentials of the scaled logits in play."""
        return self.highest + torch.log(_sum(self.weights))

    @property
    def entropy(self) -> Tensor:
        """[1] nats"""
        weights, total = self.weights, self.log_total
        logprobs = torch.where(weights > 0.0, self.scaled - total[:, None], 0.0)
        return -_sum(logprobs.mul_(weights)) / _sum(weights)

    @property
    def deviation(self) -> Tensor:
        """[1] the standard deviation of the scaled logits in play."""
        finite = torch.where(self.kept > 0.0, self.scaled, 0.0)
        mean = _sum(finite * self.kept) / self.num_kept
        squares = torch.where(self.kept > 0.0, finite - mean[:, None], 0.0).square_().mul_(self.kept)
        return torch.sqrt(_sum(squares) / self.num_kept)

    def likeliest(self, count: int) -> Tensor:
        """[1, count] scaled logits of the likeliest tokens, in play or not, by falling value."""
        few = torch.repeat_interleave(self.logits[0, :count], self._numbers[:count].clamp(max=count))
        return few[None, :count].double() / self.divisor[:, None]

    def divide(self, temperature: Tensor) -> None:
        """temperature: [1] float64"""
        self.divisor = self.divisor * temperature
        self.scaled = self.scaled / temperature[:, None]
        self._weights = None

    def keep(self, mask: Tensor) -> None:
        """Drop all but so many tokens of each level, those with the lowest ids; the likeliest in play stays."""
        self.kept = torch.minimum(self.kept, mask)
        self._weights = None

    def keep_any(self, mask: Tensor) -> None:
        """As `keep`, where the likeliest may go, and with it what the others are measured by."""
        self.keep(mask)
        self.scaled = self.scaled.masked_fill(self.kept == 0.0, -inf)

    def keep_from(self, lowest: Tensor) -> None:
        """Keep scaled logits of at least `lowest` [1]."""
        self.keep(self.at_least(lowest))

    def at_least(self, lowest: Tensor) -> Tensor:
        """All of the levels that reach `lowest` [1]; a mask as `keep` takes it."""
        return torch.where(self.scaled >= lowest[:, None], self.kept, 0.0)

    def first(self, weights: Tensor, bound: Tensor) -> Tensor:
        """Those whose weights reach the bound [1], by falling logit, ties by rising id; a mask."""
        return self._first(weights, bound)

    def nearest(self, distances: Tensor, bound: Tensor) -> Tensor:
        """Those whose weights reach the bound [1], by rising distance [1, n], of equals the likelier; a mask."""
        order = torch.sort(distances[0], stable=True).indices
        mask = self._first(self.weights[:, order], bound, self.kept[:, order])
        return torch.zeros_like(mask).index_copy_(1, order, mask)

    def unless_enough(self, mask: Tensor, count: Tensor, distances: Tensor | None) -> Tensor:
        """The mask if it keeps `count` [1] tokens, else one that does: the likeliest, or the nearest."""
        if float(_sum(mask)) >= float(count):
            return mask
        if distances is None:
            return torch.maximum(mask, self._first(self.kept, count))
        order = torch.sort(distances[0], stable=True).indices
        nearest = self._first(self.kept[:, order], count, self.kept[:, order])
        return torch.maximum(mask, torch.zeros_like(mask).index_copy_(1, order, nearest))

    def drop_all_but_last(self, above: Tensor) -> None:
        """Of the tokens of a mask, which are the likeliest, leave the one that is last in their order."""
        last = int(torch.nonzero(above[0])[-1])
        self._skipped[last] += int(self.kept[0, last]) - 1
        mask = self.kept.clone()
        mask[0, :last] = 0.0
        mask[0, last] = 1.0
        self.keep_any(mask)

    def narrow(self) -> None:
        """There is nothing to leave out of view."""

    def left(self) -> Left:
        """What is in play now."""
        inside = torch.nonzero(self.kept[0])[:, 0]
        high, low = int(inside[0]), int(inside[-1])
        in_play = InPlay(
            lowest=float(self.logits[0, low]), highest=float(self.logits[0, high]),
            lowest_ids=self._ends(low), highest_ids=self._ends(high),
        )  # fmt: skip
        total = float(_sum(self.weights))
        return Left(in_play.highest, float(self.divisor), in_play, total)

    def _ends(self, level: int) -> tuple[int, int]:
        """The first and the last id in play of a level."""
        first, last = int(self._skipped[level]), int(self._skipped[level] + self.kept[0, level]) - 1
        is_last = last + 1 == int(self._numbers[level])
        return self._nth(level, first) if first else 0, len(self._row) if is_last else self._nth(level, last)

    def _nth(self, level: int, number: int) -> int:
        """The id of a level's token."""
        value = float(self.logits[0, level])
        return int(self._kernels.ids(self._row, InPlay(lowest=value, highest=value), 1, first=number))

    def _first(self, weights: Tensor, bound: Tensor, kept: Tensor | None = None) -> Tensor:
        """How many tokens of each level come before the bound is reached, at least one.

        weights, kept: [1, n], of the levels in the order in which they are taken
        """
        kept = self.kept if kept is None else kept
        missing = max(float(bound), LEAST) - (torch.cumsum(weights, dim=-1) - weights)
        each = weights / kept  # no number where none is kept, and infinitely many of no weight
        numbers = torch.ceil(missing / each).nan_to_num_(nan=0.0, posinf=inf, neginf=0.0)
        return torch.minimum(numbers.clamp_(min=0.0), kept)


def _sum(values: Tensor) -> Tensor:
    """[1, n] -> [1]"""
    return values.sum(-1)


AnyRow: TypeAlias = FullRow | LevelRow
"""With every token in view."""
