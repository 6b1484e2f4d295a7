"""The likeliest tokens of each row, sorted, and what is known of the rest of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from math import inf

import torch
from torch import Tensor

BLOCK = 64


class Rest(IntEnum):
    """What has become of the tokens that are no candidates."""

    WHOLE = 0  # all are in play, and so is every candidate
    PIERCED = 1  # all are in play, though some candidate is not
    GONE = 2  # none is in play
    UNKNOWN = 3  # it would take more candidates to tell


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows on their way through the chain.

    token_ids: [rows, k] int64, by falling logit, ties by rising id
    logits:    [rows, k] float64, divided by `divisor`
    kept:      [rows, k] bool, in play
    edge:      [rows] float64, no other token's logit is higher, and every candidate's that was ever kept is
    rest:      [rows] int64, a `Rest` each
    divisor:   [rows] float64, the temperature applied so far
    """

    token_ids: Tensor
    logits: Tensor
    kept: Tensor
    edge: Tensor
    rest: Tensor
    divisor: Tensor

    def merged(self, rows: Tensor, other: Candidates) -> Candidates:
        """These, with the other's where `rows` [rows] bool says so."""
        return Candidates(*(_choose(rows, getattr(other, f.name), getattr(self, f.name)) for f in fields(self)))

    @property
    def ranks(self) -> Tensor:
        """[rows, k] int64: 1 for the first in play, 2 for the second; meaningless where not kept."""
        return torch.cumsum(self.kept, dim=-1)

    @property
    def num_kept(self) -> Tensor:
        return self.kept.sum(-1)

    @property
    def highest(self) -> Tensor:
        """[rows, 1] the highest logit in play."""
        return self.masked_logits.amax(-1, keepdim=True)

    @property
    def masked_logits(self) -> Tensor:
        return self.logits.masked_fill(~self.kept, -inf)


def choose_candidates(logits: Tensor, count: int) -> Candidates:
    """Take the `count` largest logits of each row.

    logits: [rows, vocab] float32, -inf is out of play

    What ties with the smallest of them is left to the rest, so which tokens are candidates depends on the logits
    alone. With count >= vocab there is no rest.
    """
    rows, vocab = logits.shape
    values, token_ids = sorted_largest(logits, min(count, vocab))
    if count >= vocab:
        edge = torch.full((rows,), -inf, dtype=torch.float64, device=logits.device)
    else:
        edge = values[:, -1].double() if count else torch.full((rows,), inf, dtype=torch.float64, device=logits.device)
    return Candidates(
        token_ids=token_ids,
        logits=values.double(),
        kept=values > edge[:, None],
        edge=edge,
        rest=torch.where(edge == -inf, Rest.GONE, Rest.WHOLE),
        divisor=torch.ones(rows, dtype=torch.float64, device=logits.device),
    )


def block_maxima(logits: Tensor) -> Tensor:
    """The largest of each 64 columns, what is left over last; nan where one is; [rows, vocab] -> [rows, blocks]"""
    num_whole = logits.shape[-1] // BLOCK
    maxima = logits[:, : num_whole * BLOCK].unflatten(-1, (num_whole, BLOCK)).amax(-1)
    tail = logits[:, num_whole * BLOCK :]
    return torch.cat((maxima, tail.amax(-1, keepdim=True)), dim=-1) if tail.shape[-1] else maxima


def likeliest(logits: Tensor) -> Tensor:
    """As torch.argmax, which takes four times as long: the first of the largest, or the first nan, [rows] int64."""
    blocks = torch.argmax(block_maxima(logits), dim=-1, keepdim=True)
    columns = blocks * BLOCK + torch.arange(BLOCK, device=logits.device)
    own = logits.gather(1, columns.clamp_(max=logits.shape[-1] - 1))
    return columns.gather(1, torch.argmax(own, dim=-1, keepdim=True))[:, 0]


def largest(logits: Tensor, count: int) -> Tensor:
    """The `count` largest logits of each row by falling value; [rows, vocab] -> [rows, count]"""
    return torch.sort(_largest(logits, count)[0], dim=-1, descending=True).values


def sorted_largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row and their ids, by falling logit, ties by rising id; [rows, count] each."""
    if count == logits.shape[-1]:
        whole = torch.sort(logits, dim=-1, descending=True, stable=True)
        return whole.values, whole.indices
    values, token_ids = _largest(logits, count)
    token_ids, by_id = torch.sort(token_ids, dim=-1)
    values, by_value = torch.sort(values.gather(1, by_id), dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, by_value)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As torch.topk, unsorted. The largest values lie in the blocks with the largest maxima: search only those."""
    vocab = logits.shape[-1]
    num_blocks = vocab // BLOCK
    if num_blocks <= 2 * count:
        return torch.topk(logits, count, dim=-1, sorted=False)
    blocks = logits[:, : num_blocks * BLOCK].unflatten(-1, (num_blocks, BLOCK))
    chosen = torch.topk(blocks.amax(-1), count, dim=-1, sorted=False).indices  # [rows, count]
    values = blocks.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    ids = (chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    if num_blocks * BLOCK < vocab:
        tail = torch.arange(num_blocks * BLOCK, vocab, device=logits.device)
        values = torch.cat((values, logits[:, num_blocks * BLOCK :]), dim=-1)
        ids = torch.cat((ids, tail.expand(logits.shape[0], -1)), dim=-1)
    values, places = torch.topk(values, count, dim=-1, sorted=False)
    return values, ids.gather(1, places)


def _choose(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return yes if yes is no else torch.where(rows[:, None] if yes.dim() == 2 else rows, yes, no)
