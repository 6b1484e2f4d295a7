"""Exact top-k, top-p and min-p on the likeliest candidates, with proof that the rest of the vocabulary is out.

Each row's candidates are its K largest logits, likeliest first. A row is settled when its truncation provably ends
inside them; the others are widened by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Truncation:
    """Per-row parameters, [rows]; neutral values: top_k = 0, top_p = 1, min_p = 0."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def of(self, rows: Tensor) -> Truncation:
        return Truncation(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Candidates:
    """The kept tokens of each row.

    token_ids:     [rows, k] int64, by falling logit, ties by rising id
    probabilities: [rows, k] float64, of the tempered distribution before renormalising; 0 where dropped
    is_settled:    [rows] bool, nothing outside the candidates could have been kept
    """

    token_ids: Tensor
    probabilities: Tensor
    is_settled: Tensor


def choose_candidates(logits: Tensor, truncation: Truncation, num_candidates: int) -> Candidates:
    """Truncate each row to the tokens that top-k, then top-p, then min-p leave.

    logits: [rows, vocab] float32, temperature already applied

    top-p is the smallest likeliest set that reaches its share of what top-k left; the crossing token stays, and so
    does the likeliest. min-p keeps what has min_p times the likeliest's probability or more.
    """
    vocab = logits.shape[-1]
    is_whole = num_candidates >= vocab
    values, token_ids = _sorted_candidates(logits, min(num_candidates, vocab))
    total = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
    probabilities = torch.exp(values.double() - total)  # [rows, k]
    ranks = torch.arange(values.shape[-1], device=logits.device)

    top_k = torch.where(truncation.top_k > 0, truncation.top_k, vocab)[:, None]
    in_top_k = ranks < top_k
    mass = torch.where(
        top_k[:, 0] <= values.shape[-1], (probabilities * in_top_k).sum(-1), torch.ones_like(total[:, 0])
    )[:, None]
    before = torch.cumsum(probabilities, dim=-1) - probabilities
    in_top_p = (before < truncation.top_p[:, None] * mass) | (truncation.top_p[:, None] >= 1.0)
    in_min_p = probabilities >= truncation.min_p[:, None] * probabilities[:, :1]
    kept = in_top_k & in_top_p & in_min_p
    kept[:, 0] = True

    # Dropped tokens are a tail. Settled: the tail begins inside, and not within a run of equal logits that could
    # go on outside, where a smaller id would have come first.
    ends_inside = kept.sum(-1) < values.shape[-1]
    last_kept = values.gather(1, (kept.sum(-1, keepdim=True) - 1))[:, 0]
    is_settled = ends_inside & (last_kept > values[:, -1])
    if is_whole:
        is_settled = torch.ones_like(is_settled)
    return Candidates(token_ids, torch.where(kept, probabilities, 0.0), is_settled)


def _sorted_candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row and their ids, by falling logit, ties by rising id."""
    values, token_ids = torch.topk(logits, count, dim=-1, sorted=False)
    token_ids, by_id = torch.sort(token_ids, dim=-1)
    values, by_value = torch.sort(values.gather(1, by_id), dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, by_value)
