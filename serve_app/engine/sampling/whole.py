"""What can only be said of a row's whole vocabulary: sums over it, and draws from it.

A few rows at a time: so float64 copies stay small enough for the cache. Each row's numbers are the same in any company:
every sum runs over fixed blocks of the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import BLOCK
from serve_app.engine.sampling.draw import pick

ROWS_AT_ONCE = 2
LARGEST = torch.finfo(torch.float64).max
NO_WEIGHT = 800.0  # nats below the highest at which a float64 exponential is 0


def slabs(num_rows: int) -> Iterator[slice]:
    """Slices of so few rows that passes over their vocabularies stay in the cache."""
    for first in range(0, num_rows, ROWS_AT_ONCE):
        yield slice(first, min(first + ROWS_AT_ONCE, num_rows))


def scaled_logits(logits: Tensor, divisor: Tensor) -> Tensor:
    """[rows, vocab] float32, [rows] float64 -> [rows, vocab] float64"""
    return logits.double().div_(divisor[:, None])


def log_totals(logits: Tensor, divisor: Tensor) -> Tensor:
    """ln of the sum of exponentials of logits / divisor; [rows, vocab] float32, [rows] -> [rows] float64"""
    return _joined(log_total_of(scaled_logits(logits[rows], divisor[rows]))[0] for rows in slabs(len(logits)))


def entropies(logits: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """`log_totals`, and the entropies of the softmax of logits / divisor in nats; [rows] float64 each"""
    totals, results = [], []
    for rows in slabs(len(logits)):
        scaled = scaled_logits(logits[rows], divisor[rows])
        total, weights = log_total_of(scaled)
        totals.append(total)
        results.append(entropy_of(scaled, weights, total))
    return torch.cat(totals), torch.cat(results)


def deviations(logits: Tensor, divisor: Tensor) -> Tensor:
    """Standard deviation (of the population) of the logits that are not -inf, divided by `divisor`; [rows] float64"""
    return _joined(
        deviation_of(logits[rows].double(), in_play(logits[rows])) / divisor[rows] for rows in slabs(len(logits))
    )


def counts(logits: Tensor) -> Tensor:
    """How many logits are not -inf; [rows] float64"""
    return _joined(row_sums(in_play(logits[rows])) for rows in slabs(len(logits)))


def log_total_of(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """ln of the sum of exponentials, and the softmax; [rows, n] float64 -> [rows], [rows, n]"""
    weights = torch.softmax(scaled, dim=-1)
    return scaled.amax(-1) - torch.log(weights.amax(-1)), weights


def entropy_of(scaled: Tensor, weights: Tensor, log_total: Tensor) -> Tensor:
    """-Σ w ln w of weights exp(scaled - log_total) that add up to 1, 0 for some; [rows, n] float64 -> [rows] nats"""
    lowest = scaled.amax(-1) - NO_WEIGHT
    logprobs = torch.maximum(scaled, lowest[:, None]).sub_(log_total[:, None])
    return -row_sums(logprobs.mul_(weights))


def deviation_of(values: Tensor, mask: Tensor) -> Tensor:
    """Standard deviation (of the population) where mask is 1; [rows, n] float64, [rows, n] float64 -> [rows]"""
    count = row_sums(mask)
    finite = values.clamp(min=torch.finfo(torch.float32).min * 1e9).mul_(mask)
    mean = row_sums(finite) / count
    squares = finite.sub_(mean[:, None]).square_().mul_(mask)
    return torch.sqrt(row_sums(squares) / count)


def in_play(logits: Tensor) -> Tensor:
    """1 where a logit is not -inf, else 0; [rows, n] float32 -> [rows, n] float64"""
    return at_least(logits, torch.full_like(logits[:, 0], torch.finfo(logits.dtype).min)).double()


def at_least(values: Tensor, lowest: Tensor) -> Tensor:
    """1 where a value reaches the row's bound, else 0; as numbers, which are cheaper to make and use than booleans.

    values: [rows, n] of any float type; lowest: [rows], of the same. Returns [rows, n] of it.
    """
    return torch.ge(values, lowest[:, None], out=torch.empty_like(values))


def infinite_where_not(mask: Tensor) -> Tensor:
    """inf where a mask of numbers is 0, 0 where it is 1; [rows, n] float64"""
    return (1.0 - mask).mul_(LARGEST).mul_(2.0)


def block_sums(values: Tensor) -> Tensor:
    """Sums of 64 columns each, what is left over last; [rows, n] float64 -> [rows, blocks]"""
    num_whole = values.shape[-1] // BLOCK
    sums = values[:, : num_whole * BLOCK].unflatten(-1, (num_whole, BLOCK)).sum(-1)
    tail = values[:, num_whole * BLOCK :]
    return torch.cat((sums, tail.sum(-1, keepdim=True)), dim=-1) if tail.shape[-1] else sums


def row_sums(values: Tensor) -> Tensor:
    """[rows, n] float64 -> [rows]"""
    return torch.cumsum(block_sums(values), dim=-1)[:, -1]


def draw(weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Race the blocks, each with the weight of its tokens, then the tokens of the block that wins.

    That is exact, since the highest of a group's Gumbel variables is one for their sum, and takes noise for one
    block and not for the vocabulary.

    weights: [rows, vocab] float64, not normalised
    keys:    [rows] int64
    Returns [rows] token ids and their [rows] probabilities.
    """
    vocab = weights.shape[-1]
    sums = block_sums(weights)
    blocks = pick(sums, vocab + torch.arange(sums.shape[-1], device=sums.device), keys)
    token_ids = blocks[:, None] * BLOCK + torch.arange(BLOCK, device=sums.device)
    own = weights.gather(1, token_ids.clamp(max=vocab - 1)).masked_fill(token_ids >= vocab, 0.0)
    columns = pick(own, token_ids, keys)[:, None]
    total = torch.cumsum(sums, dim=-1)[:, -1]
    return token_ids.gather(1, columns)[:, 0], own.gather(1, columns)[:, 0] / total


def weights_of(logits: Tensor, divisor: Tensor, dropped: list[Tensor]) -> Tensor:
    """The softmax of logits / divisor without each row's dropped token ids; [rows, vocab] float32 -> float64"""
    scaled = scaled_logits(logits, divisor)
    for row, token_ids in enumerate(dropped):
        scaled[row, token_ids] = -inf
    return torch.softmax(scaled, dim=-1)


def _joined(parts: Iterator[Tensor]) -> Tensor:
    return torch.cat(list(parts))
