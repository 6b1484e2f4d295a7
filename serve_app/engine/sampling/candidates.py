"""Rows of logits in the sampler chain: the likeliest tokens of many rows, or one row with every token in view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from math import ceil, inf

import torch
from torch import Tensor

from serve_app.engine.decoder.memory import sent

BLOCK = 64
ROWS_AT_ONCE = 32
"""Rows that a device passes over together. A CPU takes one after the other, so that its passes stay in the cache."""


class Rest(IntEnum):
    """What has become of the tokens that are no candidates."""

    WHOLE = 0  # no stage has dropped any
    GONE = 1  # none is in play
    UNKNOWN = 2  # it would take more candidates to tell


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
        """Return these, with the other's where `rows` [rows] bool says so."""
        return Candidates(*(_choose(rows, getattr(other, f.name), getattr(self, f.name)) for f in fields(self)))

    @property
    def ranks(self) -> Tensor:
        """[rows, k] int64: 1 for the first in play, 2 for the second; meaningless where not kept."""
        return torch.cumsum(self.kept, dim=-1)

    @property
    def num_kept(self) -> Tensor:
        """[rows] int64"""
        return self.kept.sum(-1)

    @property
    def masked_logits(self) -> Tensor:
        """[rows, k] the logits, -inf where not in play."""
        return self.logits.masked_fill(~self.kept, -inf)

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Return so many of the highest logits, and whether they are in play; [rows, at most count] each."""
        return self.logits[:, :count], self.kept[:, :count]

    def count_from(self, lowest: Tensor) -> Tensor:
        """Count the logits in play that are not below `lowest`; [rows] -> [rows] int64"""
        return (self.kept & (self.logits >= lowest[:, None])).sum(-1)

    def divide(self, temperature: Tensor) -> Candidates:
        """Divide the logits; [rows]"""
        return replace(
            self,
            logits=self.logits / temperature[:, None],
            edge=self.edge / temperature,
            divisor=self.divisor * temperature,
        )

    def keep_from(self, lowest: Tensor, min_keep: Tensor) -> Candidates:
        """Keep logits that are not below `lowest`, and so many of the likeliest in any case; [rows] each"""
        keep = (self.logits >= lowest[:, None]) | (self.ranks <= min_keep[:, None])
        return self._cut(keep, (self.edge >= lowest) | (self.num_kept < min_keep))

    def keep_first(self, count: Tensor, known: Tensor | None = None) -> Candidates:
        """Keep so many of the likeliest; of equals those with lower ids.  known: how many have to be candidates

        [rows] each, at least 1
        """
        return self._cut(self.ranks <= count[:, None], self.num_kept < (count if known is None else known))

    def drop_first(self, count: Tensor) -> Candidates:
        """Drop so many of the likeliest; [rows]"""
        return self._cut(self.ranks > count[:, None], torch.ones_like(self.rest, dtype=torch.bool))

    def keep_until(self, weights: Tensor, bound: Tensor, min_keep: Tensor) -> Candidates:
        """Keep the likeliest until their weights reach a bound, and so many of them in any case.

        weights: [rows, k] float64, 0 where not in play;  bound, min_keep: [rows]
        """
        cumulated = torch.cumsum(weights, dim=-1)
        keep = (cumulated - weights < bound[:, None]) | (self.ranks <= min_keep[:, None])
        return self._cut(keep, (cumulated[:, -1] < bound) | (self.num_kept < min_keep))

    def keep_typical(self, log_total: Tensor, entropy: Tensor, bound: Tensor, min_keep: Tensor) -> Candidates:
        """Keep those whose surprise is closest to the entropy until their probabilities reach a bound; [rows] each

        Of equally typical tokens the likelier goes first. Tokens that are no candidates have a surprise of at least the
        edge's, so they come after any candidate closer than that.
        """
        surprise = log_total[:, None] - self.logits
        distance = (surprise - entropy[:, None]).abs().masked_fill(~self.kept, inf)
        order = torch.sort(distance.view(torch.int64), dim=-1, stable=True).indices  # at least 0: bits rise as it does
        distance = distance.gather(1, order)
        probabilities = torch.exp(-surprise).masked_fill(~self.kept, 0.0).gather(1, order)
        cumulated = torch.cumsum(probabilities, dim=-1)
        places = torch.arange(order.shape[-1], device=order.device)
        chosen = (cumulated - probabilities < bound[:, None]) | (places < min_keep[:, None])
        farthest = distance.masked_fill(~(chosen & (distance < inf)), -inf).amax(-1)
        is_full = (cumulated[:, -1] >= bound) & (self.num_kept >= min_keep)
        is_inside = is_full & (farthest < log_total - self.edge - entropy)
        return self._cut(torch.zeros_like(chosen).scatter(1, order, chosen), ~is_inside)

    def _cut(self, keep: Tensor, reaches_rest: Tensor) -> Candidates:
        """Keep only these candidates and nothing of the rest, unless it reaches there."""
        outside = torch.where(reaches_rest, Rest.UNKNOWN, Rest.GONE)
        rest = torch.where(self.rest == Rest.WHOLE, outside, self.rest)
        return replace(self, kept=self.kept & keep, rest=rest)


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


def likeliest(logits: Tensor) -> Tensor:
    """Find the first of the largest of each row, or its first nan, as torch.argmax does.

    [rows, vocab] -> [rows] int64
    """
    blocks = torch.argmax(block_maxima(logits), dim=-1, keepdim=True)
    columns = blocks * BLOCK + torch.arange(BLOCK, device=logits.device)
    own = logits.gather(1, columns.clamp_(max=logits.shape[-1] - 1))
    return columns.gather(1, torch.argmax(own, dim=-1, keepdim=True))[:, 0]


def sorted_largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the `count` largest logits of each row and their ids, by falling logit, ties by rising id.

    [rows, vocab] -> [rows, count] each
    """
    if count == logits.shape[-1]:
        token_ids = torch.stack([_falling_order(own) for own in logits]) if len(logits) else logits.long()
        return logits.gather(1, token_ids), token_ids
    values, token_ids = _largest(logits, count)
    token_ids, by_id = torch.sort(token_ids, dim=-1)
    values, by_value = torch.sort(values.gather(1, by_id), dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, by_value)


def block_maxima(logits: Tensor) -> Tensor:
    """Find the largest of each 64 columns, what is left over last; nan where one is; [rows, vocab] -> [rows, blocks]"""
    num_whole = logits.shape[-1] // BLOCK
    maxima = logits[:, : num_whole * BLOCK].unflatten(-1, (num_whole, BLOCK)).amax(-1)
    tail = logits[:, num_whole * BLOCK :]
    return torch.cat((maxima, tail.amax(-1, keepdim=True)), dim=-1) if tail.shape[-1] else maxima


def block_sums(values: Tensor) -> Tensor:
    """Add up 64 columns each, what is left over last; [rows, n] of any float type -> [rows, blocks] float64"""
    num_whole = values.shape[-1] // BLOCK
    sums = values[:, : num_whole * BLOCK].unflatten(-1, (num_whole, BLOCK)).sum(-1)
    tail = values[:, num_whole * BLOCK :]
    return (torch.cat((sums, tail.sum(-1, keepdim=True)), dim=-1) if tail.shape[-1] else sums).double()


def row_sums(values: Tensor) -> Tensor:
    """Add up each row over fixed blocks, so that it has the same sum in any company; [rows, n] -> [rows] float64"""
    return torch.cumsum(block_sums(values), dim=-1)[:, -1]


def block_weights(
    logits: Tensor, rows: list[int], divisor: Tensor, *, without: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add up exp((logit - highest) / divisor) over 64 columns each, in float32 and their blocks in float64.

    logits:  [any rows, vocab] float32, of which `rows` are meant, [n];  divisor: [n] float64
    without: [n, m] int64, tokens of each row that are left out

    Returns sums [n, blocks] float64 and the highest logits [n] float32.
    """
    sums, highest = [], []
    for part, own in few_at_once(logits, rows):
        highest.append(own.amax(-1))
        weights = (own - highest[-1][:, None]).div_(divisor[part, None].float()).exp_()
        if without is not None:
            weights.scatter_(1, without[part], 0.0)
        sums.append(block_sums(weights))
    return torch.cat(sums), torch.cat(highest)


def few_at_once(logits: Tensor, rows: list[int]) -> Iterator[tuple[slice, Tensor]]:
    """Take the rows part by part: where each part is in `rows`, and its logits [some rows, vocab]."""
    size = 1 if logits.device.type == "cpu" else ROWS_AT_ONCE
    for first in range(0, len(rows), size):
        part = slice(first, first + size)
        yield part, take_rows(logits, rows[part])


def take_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Return these rows, without a copy where they lie side by side."""
    first = rows[0] if rows else 0
    if rows == list(range(first, first + len(rows))):
        return logits[first : first + len(rows)]
    return logits.index_select(0, sent(torch.tensor(rows), logits.device))


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Do what torch.topk does, unsorted: the largest values lie in the blocks with the largest maxima."""
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


def _falling_order(row: Tensor) -> Tensor:
    """Return the ids of a row's tokens by falling logit, ties by rising id; [vocab] float32 -> [vocab] int64

    A radix sort by the upper 16 bits of the floats, behind one by the lower 16 where a model left any. It takes the
    same few passes whatever the values are, an eighth of the time that torch takes to sort floats.
    """
    halves = (row + 0.0).view(torch.int16).view(-1, 2)  # no -0.0, which equals 0.0 but for its bits
    lower, upper = halves[:, 0], halves[:, 1].contiguous()
    signs = upper >> 15  # -1 of negative floats, whose bits rise as they fall; those of the others fall
    upper.bitwise_xor_((signs & 0x7FFF).bitwise_not_())
    if not bool(lower.any()):
        return torch.sort(upper, stable=True).indices
    order = torch.sort(lower ^ (signs ^ 0x7FFF), stable=True).indices
    return order[torch.sort(upper[order], stable=True).indices]


def _choose(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return yes if yes is no else torch.where(rows[:, None] if yes.dim() == 2 else rows, yes, no)


DIGIT_BITS = 16
NUM_DIGITS = 1 << DIGIT_BITS
LOWEST = torch.finfo(torch.float64).min
LEAST = 5e-324  # the smallest positive float64


@dataclass(frozen=True, slots=True)
class WholeRow:
    """A row on its way through the chain; a method does to it what that of `Candidates` does to them.

    A stage keeps tokens up to a last one, by falling logit or by how typical they are. That one is found by the digits
    of what orders them: the sum for each digit says in which of them the bound is reached. So it takes the same few
    passes whatever the values are, and no two tokens are compared.

    logits:  [1, vocab] float32, not divided, no -0.0; what is dropped becomes -inf
    divisor: [1] float64, the temperature applied so far
    weights: [1, vocab] float64, what is proportional to the probabilities, where the last stage knew it
    """

    logits: Tensor
    divisor: Tensor
    weights: Tensor | None = None

    @classmethod
    def of_logits(cls, logits: Tensor) -> WholeRow:
        """Copy a row, [1, vocab] float32."""
        return cls(logits + 0.0, torch.ones(1, dtype=torch.float64, device=logits.device))

    @property
    def masked_logits(self) -> Tensor:
        """[1, vocab] float64, divided, -inf where not in play."""
        return self.logits.double().div_(self.divisor)

    @property
    def kept(self) -> Tensor:
        """[1, vocab] bool, in play."""
        return self.logits > -inf

    @property
    def num_kept(self) -> Tensor:
        """[1] int64"""
        return self.kept.sum(-1)

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Return so many of the highest logits, and whether they are in play."""
        values, _ = sorted_largest(self.logits, min(count, self.logits.shape[-1]))
        return values.double() / self.divisor, values > -inf

    def count_from(self, lowest: Tensor) -> Tensor:
        """Count the logits that are not below `lowest`."""
        return self._below(lowest).logical_not_().sum(-1)

    def divide(self, temperature: Tensor) -> WholeRow:
        """Divide the logits."""
        return replace(self, divisor=self.divisor * temperature, weights=None)

    def keep_from(self, lowest: Tensor, min_keep: Tensor) -> WholeRow:
        """Keep logits that are not below `lowest`, and so many of the likeliest in any case."""
        if bool(self.count_from(lowest) < min_keep):
            return self.keep_first(min_keep)
        return self._drop(self._below(lowest))

    def keep_first(self, count: Tensor, known: Tensor | None = None) -> WholeRow:
        """Keep so many of the likeliest."""
        return self.keep_until(None, count, torch.ones_like(count))

    def drop_first(self, count: Tensor) -> WholeRow:
        """Drop so many of the likeliest."""
        last = self._last(None, float(count)) if float(count) else None
        return self if last is None else self._drop(self._behind(last).logical_not_())

    def keep_typical(self, log_total: Tensor, entropy: Tensor, bound: Tensor, min_keep: Tensor) -> WholeRow:
        """Keep those whose surprise is closest to the entropy until their probabilities reach a bound."""
        surprise = self.masked_logits.neg_().add_(log_total)
        distance = (surprise - entropy).abs_()
        return self.keep_until(surprise.neg_().exp_(), bound, min_keep, distance)

    def keep_until(
        self, weights: Tensor | None, bound: Tensor, min_keep: Tensor, distance: Tensor | None = None
    ) -> WholeRow:
        """Keep the likeliest until their weights reach a bound, and so many of them in any case.

        weights: None counts the tokens;  distance: [1, vocab] float64, what orders them before their logits do
        """
        last = self._last(weights, float(bound), distance)
        least = self._last(None, float(min_keep), distance) if float(min_keep) > 1.0 else last
        if last is None or least is None:  # all of them are not enough
            return self
        if last != least and bool(self._behind(last, distance)[0, least]):
            last = least
        behind = self._behind(last, distance)
        left = weights.masked_fill_(behind, 0.0) if weights is not None and distance is None else None
        return replace(self._drop(behind), weights=left)

    def _last(self, weights: Tensor | None, bound: float, distance: Tensor | None = None) -> int | None:
        """Find the token with which the sum of weights reaches the bound; None where all of them do not."""
        bits = self.logits.view(torch.int32)
        falling = (bits >> 31).bitwise_not_().bitwise_and_((1 << 31) - 1).bitwise_xor_(bits)  # rises, read unsigned
        orders = [falling[0]] if distance is None else [distance.view(torch.int64)[0], falling[0]]
        return _reaching(orders, None if weights is None else weights[0], max(bound, LEAST))

    def _behind(self, last: int, distance: Tensor | None = None) -> Tensor:
        """Say which tokens come after this one, [1, vocab] bool."""
        behind = self.logits < self.logits[:, last, None]
        behind[:, last + 1 :] |= self.logits[:, last + 1 :] == self.logits[:, last, None]  # of equals higher ids
        if distance is not None:
            here = distance[:, last, None]
            behind.logical_and_(distance == here).logical_or_(distance > here)
        return behind

    def _below(self, lowest: Tensor) -> Tensor:
        """Say which logits are below this one, which -inf always is."""
        return self.masked_logits < lowest.clamp(min=LOWEST)

    def _drop(self, those: Tensor) -> WholeRow:
        self.logits.masked_fill_(those, -inf)
        return replace(self, weights=None)


def _reaching(orders: list[Tensor], weights: Tensor | None, bound: float) -> int | None:
    """Find the column with which a sum over columns reaches the bound; None where it never does.

    orders:  [n] integers, read without a sign: lower ones come first, of equals what has a lower one of the next, of
             equals in all the lower column
    weights: [n] float64, at least 0; None is 1 for each
    """
    columns: Tensor | None = None  # those in question: all
    is_first = True
    for number, shift in _digits_of(orders):
        digits = (orders[number] >> shift).bitwise_and_(NUM_DIGITS - 1)
        sums = torch.bincount(digits, weights, NUM_DIGITS).double().cumsum_(-1)
        total = float(sums[-1])
        if is_first and total < bound:
            return None
        is_first, bound = False, min(bound, total)  # later sums may miss it by rounding
        digit = int(torch.searchsorted(sums, bound))
        bound -= float(sums[digit - 1]) if digit else 0.0
        inside = digits == digit
        if not (bool(inside[0] & inside[-1]) and bool(inside.all())):
            some = torch.nonzero(inside)[:, 0]
            columns = some if columns is None else columns[some]
            orders = [order[some] for order in orders]
            weights = None if weights is None else weights[some]
    place = ceil(bound if weights is None else bound / float(weights[0])) - 1
    place = min(max(place, 0), len(orders[0]) - 1)
    return place if columns is None else int(columns[place])


def _digits_of(orders: list[Tensor]) -> list[tuple[int, int]]:
    """Say of each digit, the most significant first, which order it is of and how far to the left it stands."""
    bits = [torch.iinfo(order.dtype).bits for order in orders]
    return [(at, shift) for at, size in enumerate(bits) for shift in range(size - DIGIT_BITS, -1, -DIGIT_BITS)]
