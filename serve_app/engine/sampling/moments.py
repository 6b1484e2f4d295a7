"""Sums over the distribution that a row has at some point of the chain, wherever its tokens are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import inf, nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve_app.engine.sampling import whole
from serve_app.engine.sampling.candidates import BLOCK, Candidates, Rest
from serve_app.engine.sampling.racing import kernels_for
from serve_app.engine.sampling.scratch import Scratch
from serve_app.kernels.forms import InPlay, bounds_of

if TYPE_CHECKING:
    from serve_app.kernels.cpu.vocabulary import VocabularyKernels

SAMPLED_BLOCK = 16  # one in so many blocks of the vocabulary gives the estimate
CLEARLY_LESS = 0.9


class Need(IntEnum):
    """Which sums a stage asks for."""

    NOTHING = 0
    COUNT = 1
    TOTAL = 2
    TOTAL_AND_COUNT = 3
    ENTROPY = 4
    DEVIATION = 5


@dataclass(frozen=True, slots=True)
class Moments:
    """[rows] float64 each, of all tokens in play; nan where nobody asked.

    log_total: ln of the sum of exponentials of the logits
    entropy:   nats
    deviation: standard deviation of the logits
    count:     tokens in play
    """

    log_total: Tensor
    entropy: Tensor
    deviation: Tensor
    count: Tensor


def moments(candidates: Candidates, logits: Tensor, needed: Tensor, need: Need, scratch: Scratch) -> Moments:
    """Sum over the candidates where the rest is gone, and over the vocabulary where nothing is.

    logits: [rows, vocab] float32 as they came to the chain
    needed: [rows] bool, the rows that ask
    """
    sums = of_candidates(candidates, need)
    if need is Need.NOTHING:
        return sums
    rows = torch.nonzero(needed & (candidates.rest == Rest.WHOLE))[:, 0].tolist()
    is_total = need in (Need.TOTAL, Need.TOTAL_AND_COUNT)
    kernels = kernels_for(logits) if is_total and rows else None
    if kernels is not None:
        sums.log_total[rows] = _totals(kernels, candidates, logits, rows)
        if need is Need.TOTAL:
            return sums
    for row, (own, divisor) in zip(rows, whole.each_of(rows, logits, candidates.divisor), strict=True):
        sums.count[row] = whole.count(own, scratch)[0]
        if need is Need.DEVIATION:
            sums.deviation[row] = whole.deviation(own, divisor, scratch)[0]
        elif is_total and kernels is None:
            sums.log_total[row] = whole.log_total(own, divisor, candidates.token_ids[row], scratch)[0]
        elif need is Need.ENTROPY:
            log_total, entropy = whole.total_and_entropy(own, divisor, scratch)
            sums.log_total[row], sums.entropy[row] = log_total[0], entropy[0]
    return sums


def _totals(kernels: VocabularyKernels, candidates: Candidates, logits: Tensor, rows: list[int]) -> Tensor:
    """As `whole.log_total`, of rows of which nothing was dropped; [n] float64"""
    raw = logits[torch.tensor(rows)[:, None], candidates.token_ids[rows]]
    divisors, highest, edges = candidates.divisor[rows], raw[:, 0], raw[:, -1]
    others = bounds_of([InPlay(highest=edge) for edge in edges.tolist()])
    rest = torch.cumsum(kernels.weigh(logits, rows, highest, divisors, *others), dim=-1)[:, -1]
    own = torch.exp((raw.double() - highest.double()[:, None]) / divisors[:, None])
    own = torch.where(raw > edges[:, None], own, 0.0)
    return highest.double() / divisors + torch.log(rest + torch.cumsum(own, dim=-1)[:, -1])


def holds_too_little(candidates: Candidates, logits: Tensor, share: Tensor) -> Tensor:
    """Whether candidates hold so much less than a share of all probability that sums over the vocabulary are not
    worth their time, by a look at some blocks of it; only of rows of which nothing was dropped.

    It may be wrong: then a row takes the longer way to the same tokens. [rows] float64 -> [rows] bool
    """
    is_whole = candidates.rest == Rest.WHOLE
    num_blocks = logits.shape[-1] // BLOCK
    if not candidates.logits.shape[-1] or not num_blocks or not bool(is_whole.any()):
        return torch.zeros_like(is_whole)
    blocks = logits[:, : num_blocks * BLOCK].unflatten(-1, (num_blocks, BLOCK))[:, ::SAMPLED_BLOCK]
    seen = blocks.flatten(1).double().div_(candidates.divisor[:, None])
    highest = candidates.logits[:, :1]
    outside = torch.exp(seen - highest).masked_fill_(seen > candidates.edge[:, None], 0.0)
    own = torch.cumsum(torch.exp(candidates.logits - highest), dim=-1)[:, -1]
    rest = torch.cumsum(outside, dim=-1)[:, -1] * (logits.shape[-1] / seen.shape[-1])
    is_hopeless: Tensor = is_whole & (own < CLEARLY_LESS * share * (own + rest))
    return is_hopeless


def of_candidates(candidates: Candidates, need: Need) -> Moments:
    """Sums over those in play; nan where there are none."""
    num_rows, device = len(candidates.rest), candidates.logits.device
    log_total, entropy, deviation, count = torch.full((4, num_rows), nan, dtype=torch.float64, device=device)
    if need is not Need.NOTHING and candidates.logits.shape[-1]:
        masked = candidates.masked_logits
        log_total = _log_total(masked)
        if need is Need.ENTROPY:
            entropy = _entropy(masked - log_total[:, None])
        if need is Need.DEVIATION:
            deviation = _deviation(candidates)
        count = candidates.num_kept.double()
    return Moments(log_total, entropy, deviation, count)


def _entropy(logprobs: Tensor) -> Tensor:
    """[..., n] float64 natural log-probabilities -> [...] nats; -inf counts nothing."""
    return -torch.cumsum(torch.exp(logprobs) * logprobs.masked_fill(logprobs == -inf, 0.0), dim=-1)[..., -1]


def _log_total(masked: Tensor) -> Tensor:
    """As logsumexp; the sum is a cumulated one, whose order of addition does not depend on the number of rows."""
    highest = masked.amax(-1)
    return highest + torch.log(torch.cumsum(torch.exp(masked - highest[:, None]), dim=-1)[:, -1])


def _deviation(candidates: Candidates) -> Tensor:
    kept = candidates.kept
    values = candidates.logits.masked_fill(~kept, 0.0)
    count = kept.sum(-1)
    mean = torch.cumsum(values, dim=-1)[:, -1] / count
    squares = ((values - mean[:, None]) ** 2).masked_fill(~kept, 0.0)
    return torch.sqrt(torch.cumsum(squares, dim=-1)[:, -1] / count)
