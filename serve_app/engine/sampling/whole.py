"""What can only be said of a row's whole vocabulary: sums over it, and draws from it.

One row at a time: so a row's numbers are the same in any company, and float64 copies stay small enough for the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import BLOCK
from serve_app.engine.sampling.draw import pick


@dataclass(frozen=True, slots=True)
class Whole:
    """Weights of all tokens of one row, those dropped at 0; not normalised.

    weights: [vocab] float64
    """

    weights: Tensor

    @classmethod
    def of(cls, logits: Tensor, divisor: Tensor, dropped: Tensor) -> Whole:
        """logits: [vocab] float32; divisor: scalar float64; dropped: [n] token ids out of play"""
        scaled = logits.double().div_(divisor)
        scaled[dropped] = -inf
        return cls(scaled.sub_(scaled.amax()).exp_())

    def draw(self, key: Tensor) -> int:
        """Race the blocks, each with the weight of its tokens, then the tokens of the block that wins.

        That is exact, since the highest of a group's Gumbel variables is one for their sum, and takes noise for one
        block and not for the vocabulary. key: scalar int64
        """
        vocab = self.weights.shape[0]
        weights = torch.nn.functional.pad(self.weights, (0, -vocab % BLOCK)).view(-1, BLOCK)
        sums = torch.cumsum(weights, dim=-1)[:, -1]
        ids = torch.arange(len(sums), device=sums.device)
        block = int(pick(sums[None], vocab + ids, key[None]))
        tokens = torch.arange(block * BLOCK, (block + 1) * BLOCK, device=sums.device)
        return block * BLOCK + int(pick(weights[block][None], tokens, key[None]))


def log_total(logits: Tensor, divisor: Tensor) -> Tensor:
    """ln of the sum of exponentials of logits / divisor; [vocab] float32, scalar -> scalar float64"""
    return torch.logsumexp(logits.double() / divisor, dim=-1)


def entropy(logits: Tensor, divisor: Tensor, total: Tensor) -> Tensor:
    """Of the softmax of logits / divisor, in nats; `total` is its `log_total`."""
    return entropy_of(logits.double() / divisor - total)


def entropy_of(logprobs: Tensor) -> Tensor:
    """[..., n] float64 natural log-probabilities -> [...] nats; -inf counts nothing."""
    return -torch.cumsum(torch.exp(logprobs) * logprobs.masked_fill(logprobs == -inf, 0.0), dim=-1)[..., -1]


def deviation(logits: Tensor, divisor: Tensor) -> Tensor:
    """Standard deviation (of the population) of the logits that are not -inf, divided by `divisor`."""
    return logits[logits > -inf].double().std(correction=0) / divisor
