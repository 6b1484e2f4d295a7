"""Log-probabilities of the raw distribution, float32: before temperature, truncation or any other edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import Scratch, block_weights, sorted_largest


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
    """Return ln of each row's sum of exponentials; [rows, vocab] float32 -> [rows] float64"""
    rows = list(range(len(logits)))
    ones = torch.ones(len(rows), dtype=torch.float64, device=logits.device)
    sums, highest = block_weights(logits, rows, ones, scratch)
    return highest.double() + torch.log(torch.cumsum(sums, dim=-1)[:, -1])
