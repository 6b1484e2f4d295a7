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

ROWS_AT_ONCE = 1
LARGEST = torch.finfo(torch.float64).max
NO_WEIGHT = 800.0  # nats below the highest at which a float64 exponential is 0


def slabs(num_rows: int) -> Iterator[slice]:
    """Slices of so few rows that passes over their vocabularies stay in the cache."""
    for first in range(0, num_rows, ROWS_AT_ONCE):
        yield slice(first, min(first + ROWS_AT_ONCE, num_rows))


def scaled_logits(logits: Tensor, divisor: Tensor) -> Tensor:
    """[rows, vocab] float32, [rows] float64 -> [rows, vocab] float64"""
    scaled = logits.double()
    return scaled if bool((divisor == 1.0).all()) else scaled.div_(divisor[:, None])


def log_totals(logits: Tensor, divisor: Tensor) -> Tensor:
    """ln of the sum of exponentials of logits / divisor; [rows, vocab] float32, [rows] -> [rows] float64"""
    return _joined(_log_total(scaled_logits(logits[rows], divisor[rows])) for rows in slabs(len(logits)))


def entropies(logits: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """`log_totals`, and the entropies of the softmax of logits / divisor in nats; [rows] float64 each"""
    totals, results = [], []
    for rows in slabs(len(logits)):
        scaled = scaled_logits(logits[rows], divisor[rows])
        highest = scaled.amax(-1)
        weights = weights_of(scaled, highest)
        totals.append(highest + torch.log(row_sums(weights)))
        results.append(entropy_of(scaled, weights, highest))
    return torch.cat(totals), torch.cat(results)


def deviations(logits: Tensor, divisor: Tensor) -> Tensor:
    """Standard deviation (of the population) of the logits that are not -inf, divided by `divisor`; [rows] float64"""
    return _joined(
        deviation_of(logits[rows].double(), in_play(logits[rows])) / divisor[rows] for rows in slabs(len(logits))
    )


def counts(logits: Tensor) -> Tensor:
    """How many logits are not -inf; [rows] float64"""
    return _joined(row_sums(in_play(logits[rows])) for rows in slabs(len(logits)))


def weights_of(scaled: Tensor, highest: Tensor) -> Tensor:
    """exp(scaled - highest); [rows, n] float64, [rows] -> [rows, n]"""
    return (scaled - highest[:, None]).exp_()


def entropy_of(scaled: Tensor, weights: Tensor, reference: Tensor) -> Tensor:
    """Of the distribution whose weights are exp(scaled - reference), not normalised, 0 for some.

    [rows, n] float64, [rows, n], [rows] -> [rows] nats
    """
    total = row_sums(weights)
    log_total = reference + torch.log(total)
    lowest = scaled.amax(-1) - NO_WEIGHT
    logprobs = torch.maximum(scaled, lowest[:, None]).sub_(log_total[:, None])
    return -row_sums(logprobs.mul_(weights)) / total


def deviation_of(values: Tensor, mask: Tensor) -> Tensor:
    """Standard deviation (of the population) where mask is 1; [rows, n] float64, [rows, n] float64 -> [rows]"""
    count = row_sums(mask)
    finite = values.clamp(min=torch.finfo(torch.float32).min * 1e9).mul_(mask)
    mean = row_sums(finite) / count
    squares = finite.sub_(mean[:, None]).square_().mul_(mask)
    return torch.sqrt(row_sums(squares) / count)


def in_play(logits: Tensor) -> Tensor:
    """1 where a logit is not -inf, else 0; [rows, n] float32 -> [rows, n] float64"""
    if bool(logits.amin() > -inf):  # as without a constraint or ban
        return torch.ones_like(logits, dtype=torch.float64)
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


def weights_without(logits: Tensor, divisor: Tensor, dropped: list[Tensor]) -> Tensor:
    """Proportional to the softmax of logits / divisor without each row's dropped token ids.

    logits: [rows, vocab] float32; divisor: [rows] float64. Returns [rows, vocab] float64.
    """
    scaled = scaled_logits(logits, divisor)
    for row, token_ids in enumerate(dropped):
        scaled[row, token_ids] = -inf
    return scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()


def _log_total(scaled: Tensor) -> Tensor:
    """Of rows that are nobody else's: they become their weights."""
    highest = scaled.amax(-1)
    return highest + torch.log(row_sums(scaled.sub_(highest[:, None]).exp_()))


def _joined(parts: Iterator[Tensor]) -> Tensor:
    return torch.cat(list(parts))
