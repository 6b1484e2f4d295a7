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
    """Score one target per row of logits, [rows, vocab] float32."""
    num_top, there = min(num_top, logits.shape[-1]), torch.tensor(targets, dtype=torch.int64, device=logits.device)
    found = [part.tolist() for part in scores_of(logits, there, num_top, scratch or Scratch())]
    ranks = _ranks(logits, targets) if ranked else [None] * len(targets)
    return [
        Scored(target, logprob, tuple(zip(ids, tops, strict=True)), rank)
        for target, logprob, ids, tops, rank in zip(targets, *found, ranks, strict=True)
    ]


def scores_of(logits: Tensor, targets: Tensor, num_top: int, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of targets, ids of the likeliest tokens, and theirs; looks at no number of a device.

    logits: [rows, vocab] float32;  targets: [rows] int64

    Returns [rows] float64, [rows, num_top] int64, [rows, num_top] float64.
    """
    totals = log_totals(logits, scratch)
    own = logits.gather(1, targets[:, None])[:, 0] - totals
    none = logits[:, :0]
    values, token_ids = sorted_largest(logits, num_top) if num_top else (none, none.long())
    return own, token_ids, values - totals[:, None]


def _ranks(logits: Tensor, targets: Sequence[int]) -> list[int]:
    """Count the tokens of each row that are at least as likely as its target, in the memory of one row."""
    return [int((own >= own[target]).sum()) for own, target in zip(logits, targets, strict=True)]


def log_totals(logits: Tensor, scratch: Scratch) -> Tensor:
    """Return ln of each row's sum of exponentials; [rows, vocab] float32 -> [rows] float64"""
    rows = list(range(len(logits)))
    ones = torch.ones(len(rows), dtype=torch.float64, device=logits.device)
    sums, highest = block_weights(logits, rows, ones, scratch)
    return highest.double() + torch.log(torch.cumsum(sums, dim=-1)[:, -1])
