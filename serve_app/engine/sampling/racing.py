"""Draws of rows of which much is left: the blocks' sums are made by kernels of ours, in one pass over each row."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import BLOCK
from serve_app.engine.sampling.draw import pick
from serve_app.kernels.forms import ALL, InPlay, bounds_of
from serve_app.kernels.interface import vocabulary_kernels

if TYPE_CHECKING:
    from serve_app.kernels.cpu.vocabulary import VocabularyKernels

LEAST_VOCAB = 256
"""Beyond which a row's tokens are more than those that are looked at one by one anyway."""


def kernels_of(vocab: int) -> VocabularyKernels | None:
    """Made when they are asked for first, in 0.3 to 0.8 s."""
    return vocabulary_kernels() if vocab > LEAST_VOCAB else None


def kernels_for(logits: Tensor) -> VocabularyKernels | None:
    """None where no kernel reads these rows."""
    kernels = kernels_of(logits.shape[-1])
    return kernels if kernels is not None and kernels.takes(logits) else None


@dataclass(frozen=True, slots=True)
class Left:
    """What the chain leaves of a row.

    highest: logit that is left;  divisor: of the logits, the temperature
    total:   Σ exp((logit - highest) / divisor), if that is known better than in seven digits
    """

    highest: float
    divisor: float
    in_play: InPlay = ALL
    total: float | None = None

    def weights(self, logits: Tensor) -> Tensor:
        """[n] float32 -> [n] float64"""
        return torch.exp((logits.double() - self.highest) / self.divisor)


def race(
    kernels: VocabularyKernels, logits: Tensor, rows: Items[int], left: Items[Left], keys: Tensor
) -> list[tuple[int, float]]:
    """Draw a token of each row, and tell its probability: first a block by the weight of its tokens, then one of these.

    As `whole.draw` does it: the highest of a group's Gumbel variables is one for their sum.

    logits: [any rows, vocab] float32;  rows: [n], which are meant;  keys: [n] int64
    """
    vocab = logits.shape[-1]
    highest, divisors = (
        torch.tensor(numbers, dtype=torch.float64)
        for numbers in zip(*((each.highest, each.divisor) for each in left), strict=True)
    )
    bounds, ends = bounds_of([each.in_play for each in left])
    sums = kernels.weigh(logits, rows, highest, divisors, bounds, ends)
    blocks = pick(sums, vocab + torch.arange(sums.shape[-1]), keys)
    token_ids = blocks[:, None] * BLOCK + torch.arange(BLOCK)
    values = logits[torch.tensor(rows)[:, None], token_ids.clamp(max=vocab - 1)]
    exists = _are_in_play(values, token_ids, bounds, ends).logical_and_(token_ids < vocab)
    weights = torch.exp((values.double() - highest[:, None]) / divisors[:, None])
    own = torch.where(exists, weights, 0.0)
    columns = pick(own, token_ids, keys)[:, None]
    totals = torch.cumsum(sums, dim=-1)[:, -1].tolist()
    drawn = token_ids.gather(1, columns)[:, 0].tolist(), own.gather(1, columns)[:, 0].tolist()
    return [
        (token_id, weight / (total if each.total is None else each.total))
        for token_id, weight, total, each in zip(*drawn, totals, left, strict=True)
    ]


def _are_in_play(logits: Tensor, ids: Tensor, bounds: Tensor, ends: Tensor) -> Tensor:
    """[n, m] bool; logits, ids: [n, m];  bounds: [n, 2];  ends: [n, 4]"""
    low, high, ends = bounds[:, :1], bounds[:, 1:], ends[:, :, None]
    has_low = (logits == low) & (ids >= ends[:, 0]) & (ids <= ends[:, 1])
    has_high = (logits == high) & (ids >= ends[:, 2]) & (ids <= ends[:, 3])
    return ((logits > low) | has_low) & ((logits < high) | has_high)
