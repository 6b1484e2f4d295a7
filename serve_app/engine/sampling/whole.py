"""What can only be said of a row's whole vocabulary: sums over it, and draws from it.

One row at a time: so float64 copies stay small enough for the cache, and one scratch does for all of them. Each row's
numbers are the same in any company: every sum runs over fixed blocks of the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from math import inf

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import BLOCK
from serve_app.engine.sampling.noise import pick
from serve_app.engine.sampling.scratch import Scratch

LARGEST = torch.finfo(torch.float32).max
NO_WEIGHT = 800.0  # nats below the highest at which a float64 exponential is 0


def each_of(rows: Items[int], logits: Tensor, divisor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Row after row, so that passes over its vocabulary stay in the cache; [1, vocab] and [1] each, without a copy."""
    for row in rows:
        yield logits[row : row + 1], divisor[row : row + 1]


def scaled_logits(logits: Tensor, divisor: Tensor, scratch: Scratch) -> Tensor:
    """[1, vocab] float32, [1] float64 -> [1, vocab] float64, scratch's "scaled\""""
    scaled = scratch.copy("scaled", logits, torch.float64)
    return scaled if bool((divisor == 1.0).all()) else scaled.div_(divisor[:, None])


def log_total(logits: Tensor, divisor: Tensor, token_ids: Tensor, scratch: Scratch) -> Tensor:
    """ln of the sum of exponentials of logits / divisor; [1, vocab] float32, [1] -> [1] float64

    token_ids: [n] int64, each once: the likeliest. They are added up in float64, the others in float32, in a quarter of
    the time; so what is wrong is a ten-millionth of what the others weigh.
    """
    highest = logits.amax(-1)
    weights = light_weights(logits, highest, divisor, scratch)
    weights[0, token_ids] = 0.0
    own = torch.exp((logits[:, token_ids].double() - highest.double()[:, None]) / divisor[:, None])
    return highest.double() / divisor + torch.log(row_sums(weights) + own.sum(-1))


def light_weights(logits: Tensor, highest: Tensor, divisor: Tensor, scratch: Scratch) -> Tensor:
    """exp((logits - highest) / divisor); [1, vocab] float32, [1], [1] float64 -> [1, vocab] float32 in scratch"""
    weights = torch.sub(logits, highest[:, None], out=scratch.take("light", logits, torch.float32))
    return weights.exp_() if float(divisor) == 1.0 else weights.div_(float(divisor)).exp_()


def total_and_entropy(logits: Tensor, divisor: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """`log_total`, and the entropy of the softmax of logits / divisor in nats; [1] float64 each"""
    scaled = scaled_logits(logits, divisor, scratch)
    highest = scaled.amax(-1)
    weights = weights_of(scaled, highest, scratch.take("weights", scaled, torch.float64))
    return highest + torch.log(row_sums(weights)), entropy_of(scaled, weights, highest, scratch)


def deviation(logits: Tensor, divisor: Tensor, scratch: Scratch) -> Tensor:
    """Standard deviation (of the population) of the logits that are not -inf, divided by `divisor`; [1] float64"""
    mask = scratch.copy("kept", in_play(logits, scratch), torch.float64)
    return deviation_of(scratch.copy("scaled", logits, torch.float64), mask, scratch) / divisor


def count(logits: Tensor, scratch: Scratch) -> Tensor:
    """How many logits are not -inf; [1, vocab] -> [1] float64"""
    if float(logits.amin()) > -inf:
        return torch.full((1,), logits.shape[-1], dtype=torch.float64, device=logits.device)
    return in_play(logits, scratch).sum(-1, dtype=torch.float64)


def weights_of(scaled: Tensor, highest: Tensor, out: Tensor) -> Tensor:
    """exp(scaled - highest); [rows, n] float64, [rows] -> [rows, n], which may be `scaled` itself"""
    return torch.sub(scaled, highest[:, None], out=out).exp_()


def entropy_of(scaled: Tensor, weights: Tensor, reference: Tensor, scratch: Scratch) -> Tensor:
    """Of the distribution whose weights are exp(scaled - reference), not normalised, 0 for some.

    [1, n] float64, [1, n], [1] -> [1] nats
    """
    total = row_sums(weights)
    lowest = float(scaled.amax()) - NO_WEIGHT
    logprobs = torch.clamp(scaled, min=lowest, out=scratch.take("own", scaled, torch.float64))
    return -row_sums(logprobs.sub_((reference + torch.log(total))[:, None]).mul_(weights)) / total


def deviation_of(values: Tensor, mask: Tensor, scratch: Scratch) -> Tensor:
    """Standard deviation (of the population) where mask is 1; [1, n] float64, [1, n] float64 -> [1]"""
    num_in_play = row_sums(mask)
    buffer = scratch.take("own", values, torch.float64)
    finite = torch.clamp(values, min=-LARGEST * 1e9, out=buffer).mul_(mask)
    mean = row_sums(finite) / num_in_play
    squares = finite.sub_(mean[:, None]).square_().mul_(mask)
    return torch.sqrt(row_sums(squares) / num_in_play)


def in_play(logits: Tensor, scratch: Scratch) -> Tensor:
    """1 where a logit is not -inf, else 0; [1, n] float32 -> [1, n] float32, scratch's "compared\""""
    lowest = torch.full_like(logits[:, 0], -LARGEST)
    return at_least(logits, lowest, scratch.take("compared", logits, torch.float32))


def at_least(values: Tensor, lowest: Tensor, out: Tensor) -> Tensor:
    """1 where a value reaches the row's bound, else 0; as numbers, which are cheaper to make and use than booleans.

    values: [rows, n] of any float type; lowest: [rows], of the same; out: [rows, n], of the same
    """
    return torch.ge(values, lowest[:, None], out=out)


def block_sums(values: Tensor) -> Tensor:
    """Sums of 64 columns each, what is left over last; [rows, n] of any float type -> [rows, blocks] float64"""
    num_whole = values.shape[-1] // BLOCK
    sums = values[:, : num_whole * BLOCK].unflatten(-1, (num_whole, BLOCK)).sum(-1)
    tail = values[:, num_whole * BLOCK :]
    return (torch.cat((sums, tail.sum(-1, keepdim=True)), dim=-1) if tail.shape[-1] else sums).double()


def row_sums(values: Tensor) -> Tensor:
    """[rows, n] of any float type -> [rows] float64"""
    return torch.cumsum(block_sums(values), dim=-1)[:, -1]


def draw(weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Race the blocks, each with the weight of its tokens, then the tokens of the block that wins.

    That is exact, since the highest of a group's Gumbel variables is one for their sum, and takes noise for one
    block and not for the vocabulary.

    weights: [rows, vocab] float32 or float64, not normalised
    keys:    [rows] int64
    Returns [rows] token ids and their [rows] probabilities.
    """
    vocab = weights.shape[-1]
    sums = block_sums(weights)
    blocks = pick(sums, vocab + torch.arange(sums.shape[-1], device=sums.device), keys)
    token_ids = blocks[:, None] * BLOCK + torch.arange(BLOCK, device=sums.device)
    own = weights.gather(1, token_ids.clamp(max=vocab - 1)).double().masked_fill(token_ids >= vocab, 0.0)
    columns = pick(own, token_ids, keys)[:, None]
    total = torch.cumsum(sums, dim=-1)[:, -1]
    return token_ids.gather(1, columns)[:, 0], own.gather(1, columns)[:, 0] / total


def weights_without(logits: Tensor, divisor: Tensor, dropped: Tensor, scratch: Scratch) -> Tensor:
    """Proportional to the softmax of logits / divisor without the dropped token ids.

    logits: [1, vocab] float32; divisor: [1] float64; dropped: [n]. Returns [1, vocab] float64, scratch's "scaled".
    """
    scaled = scaled_logits(logits, divisor, scratch)
    scaled[0, dropped] = -inf
    return weights_of(scaled, scaled.amax(-1), scaled)


def light_weights_without(logits: Tensor, divisor: Tensor, dropped: Tensor, scratch: Scratch) -> Tensor:
    """As `weights_without`, to seven digits and in a quarter of the time; [1, vocab] float32, scratch's light one."""
    if len(dropped):
        logits = scratch.copy("scaled", logits, torch.float32)
        logits[0, dropped] = -inf
    return light_weights(logits, logits.amax(-1), divisor, scratch)
