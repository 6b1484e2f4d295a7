"""Log-probabilities of the raw distribution, float32: before temperature, truncation or any other edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scored:
    """A token's log-probability and the likeliest tokens beside it, by falling log-probability."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def score(logits: Tensor, targets: Sequence[int], num_top: int) -> list[Scored]:
    """Score one target per row.

    logits: [rows, vocab] float32
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    rows = torch.arange(len(targets), device=logits.device)
    of_targets = logprobs[rows, torch.tensor(targets, device=logits.device)].tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in targets]
    if num_top:
        values, token_ids = torch.topk(logprobs, min(num_top, logits.shape[-1]), dim=-1)
        for row, (ids, scores) in enumerate(zip(token_ids.tolist(), values.tolist(), strict=True)):
            tops[row] = list(zip(ids, scores, strict=True))
    return [Scored(target, logprob, tuple(top)) for target, logprob, top in zip(targets, of_targets, tops, strict=True)]
