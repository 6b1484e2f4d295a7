"""Log-probabilities of the raw distribution, float32: before temperature, truncation or any other edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import block_maxima, sorted_largest
from serve_app.engine.sampling.racing import kernels_for
from serve_app.engine.sampling.scratch import Scratch
from serve_app.engine.sampling.whole import light_weights, row_sums
from serve_app.kernels.forms import ALL, bounds_of

if TYPE_CHECKING:
    from serve_app.kernels.cpu.vocabulary import VocabularyKernels

ROWS_AT_ONCE = 64
"""Of which sums of blocks are there, 20 KB each."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A token's log-probability and the likeliest tokens beside it, by falling log-probability.

    rank: how many tokens are at least as likely, itself included; None where nobody asked
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


def score(
    logits: Tensor, targets: Sequence[int], num_top: int, scratch: Scratch | None = None, *, ranked: bool = False
) -> list[Scored]:
    """Score one target per row.

    logits: [rows, vocab] float32
    """
    totals = log_totals(logits, scratch or Scratch())
    rows = torch.arange(len(targets), device=logits.device)
    of_targets = (logits[rows, torch.tensor(targets, device=logits.device)] - totals).tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in targets]
    if num_top:
        values, token_ids = sorted_largest(logits, min(num_top, logits.shape[-1]))
        logprobs = (values - totals[:, None]).tolist()
        for row, (ids, scores) in enumerate(zip(token_ids.tolist(), logprobs, strict=True)):
            tops[row] = list(zip(ids, scores, strict=True))
    ranks = _ranks(logits, targets) if ranked else [None] * len(targets)
    return [
        Scored(target, logprob, tuple(top), rank)
        for target, logprob, top, rank in zip(targets, of_targets, tops, ranks, strict=True)
    ]


def _ranks(logits: Tensor, targets: Sequence[int]) -> list[int]:
    """How many tokens of each row are at least as likely as its target, in the memory of one row."""
    return [int((own >= own[target]).sum()) for own, target in zip(logits, targets, strict=True)]


def log_totals(logits: Tensor, scratch: Scratch) -> Tensor:
    """ln of each row's sum of exponentials, in the memory of a few rows; [rows, vocab] float32 -> [rows] float64"""
    highest = block_maxima(logits).amax(-1)
    kernels = kernels_for(logits)
    if kernels is None:
        sums = torch.cat([_total(logits[row : row + 1], highest[row : row + 1], scratch) for row in range(len(logits))])
    else:
        sums = _totals(kernels, logits, highest)
    return highest.double() + torch.log(sums)


def _total(row: Tensor, highest: Tensor, scratch: Scratch) -> Tensor:
    """[1, vocab] float32, [1] -> [1] float64"""
    return row_sums(light_weights(row, highest, torch.ones(1, dtype=torch.float64, device=row.device), scratch))


def _totals(kernels: VocabularyKernels, logits: Tensor, highest: Tensor) -> Tensor:
    """[rows, vocab] float32, [rows] -> [rows] float64"""
    sums = torch.empty(len(logits), dtype=torch.float64)
    for first in range(0, len(logits), ROWS_AT_ONCE):
        own = sums[first : first + ROWS_AT_ONCE]
        rows = range(first, first + len(own))
        weights = kernels.weigh(
            logits, rows, highest[first : first + ROWS_AT_ONCE], torch.ones(len(own)), *bounds_of([ALL] * len(own))
        )
        own.copy_(torch.cumsum(weights, dim=-1)[:, -1])
    return sums
