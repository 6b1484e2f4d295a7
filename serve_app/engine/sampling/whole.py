"""One row with every token in view, in no order: how a draw goes on where the likeliest few do not settle it.

A stage keeps tokens up to a last one, by falling logit or by how typical they are. That one is found by the digits of
what orders them: the sum for each digit says in which of them the bound is reached. So it takes the same few passes
whatever the values are, and no two tokens are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import Scratch, sorted_largest

DIGIT_BITS = 16
NUM_DIGITS = 1 << DIGIT_BITS
LOWEST = torch.finfo(torch.float64).min
LEAST = 5e-324  # the smallest positive float64


@dataclass(frozen=True, slots=True)
class WholeRow:
    """A row on its way through the chain; a method does to it what that of `Candidates` does to them.

    Everything large is scratch, so there is one row at a time.

    logits:  [1, vocab] float32, not divided, no -0.0; what is dropped becomes -inf
    divisor: [1] float64, the temperature applied so far
    weights: [1, vocab] float64, what is proportional to the probabilities, where the last stage knew it
    """

    logits: Tensor
    divisor: Tensor
    scratch: Scratch
    weights: Tensor | None = None

    @classmethod
    def of_logits(cls, logits: Tensor, scratch: Scratch) -> WholeRow:
        """Copy a row, [1, vocab] float32."""
        own = torch.add(logits, 0.0, out=scratch.take("whole", logits, torch.float32))
        return cls(own, torch.ones(1, dtype=torch.float64, device=logits.device), scratch)

    @property
    def masked_logits(self) -> Tensor:
        """[1, vocab] float64, divided, -inf where not in play."""
        return self.scratch.copy("masked", self.logits, torch.float64).div_(self.divisor)

    @property
    def kept(self) -> Tensor:
        """[1, vocab] bool, in play."""
        return torch.gt(self.logits, -inf, out=self.scratch.take("kept", self.logits, torch.bool))

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
        return self._keep_until(None, count, torch.ones_like(count))

    def drop_first(self, count: Tensor) -> WholeRow:
        """Drop so many of the likeliest."""
        last = self._last(None, float(count)) if float(count) else None
        return self if last is None else self._drop(self._behind(last).logical_not_())

    def keep_until(self, weights: Tensor, bound: Tensor, min_keep: Tensor) -> WholeRow:
        """Keep the likeliest until their weights reach a bound, and so many of them in any case."""
        return self._keep_until(weights, bound, min_keep)

    def keep_typical(self, log_total: Tensor, entropy: Tensor, bound: Tensor, min_keep: Tensor) -> WholeRow:
        """Keep those whose surprise is closest to the entropy until their probabilities reach a bound."""
        surprise = self.masked_logits.neg_().add_(log_total)
        distance = torch.sub(surprise, entropy, out=self.scratch.take("distance", surprise, torch.float64)).abs_()
        return self._keep_until(surprise.neg_().exp_(), bound, min_keep, distance)

    def _keep_until(
        self, weights: Tensor | None, bound: Tensor, min_keep: Tensor, distance: Tensor | None = None
    ) -> WholeRow:
        """Without weights count the tokens; distance: [1, vocab] float64, what orders them before their logits do."""
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
        falling = torch.bitwise_right_shift(bits, 31, out=self.scratch.take("falling", bits, torch.int32))
        falling.bitwise_not_().bitwise_and_((1 << 31) - 1).bitwise_xor_(bits)  # rises, read without a sign
        orders = [falling[0]] if distance is None else [distance.view(torch.int64)[0], falling[0]]
        return _reaching(orders, None if weights is None else weights[0], max(bound, LEAST), self.scratch)

    def _behind(self, last: int, distance: Tensor | None = None) -> Tensor:
        """Say which tokens come after this one, [1, vocab] bool."""
        here, later = slice(last, last + 1), slice(last + 1, None)
        behind = self.scratch.take("behind", self.logits, torch.bool)
        torch.lt(self.logits[:, : last + 1], self.logits[:, here], out=behind[:, : last + 1])
        torch.le(self.logits[:, later], self.logits[:, here], out=behind[:, later])  # of equals those with higher ids
        if distance is not None:
            compared = self.scratch.take("compared", distance, torch.bool)
            behind.logical_and_(torch.eq(distance, distance[:, here], out=compared))
            behind.logical_or_(torch.gt(distance, distance[:, here], out=compared))
        return behind

    def _below(self, lowest: Tensor) -> Tensor:
        """Say which logits are below this one, which -inf always is."""
        lowest = lowest.clamp(min=LOWEST)
        return torch.lt(self.masked_logits, lowest, out=self.scratch.take("behind", self.logits, torch.bool))

    def _drop(self, those: Tensor) -> WholeRow:
        self.logits.masked_fill_(those, -inf)
        return replace(self, weights=None)


def _reaching(orders: list[Tensor], weights: Tensor | None, bound: float, scratch: Scratch) -> int | None:
    """Find the column with which a sum over columns reaches the bound; None where it never does.

    orders:  [n] integers, read without a sign: lower ones come first, of equals what has a lower one of the next, of
             equals in all the lower column
    weights: [n] float64, at least 0; None is 1 for each
    """
    columns: Tensor | None = None  # those in question: all
    is_first = True
    for number, shift in _digits_of(orders):
        own = orders[number]
        digits = torch.bitwise_right_shift(own, shift, out=scratch.take("digits", own, own.dtype))
        sums = torch.bincount(digits.bitwise_and_(NUM_DIGITS - 1), weights, NUM_DIGITS).double().cumsum_(-1)
        total = float(sums[-1])
        if is_first and total < bound:
            return None
        is_first, bound = False, min(bound, total)  # later sums may miss it by rounding
        digit = int(torch.searchsorted(sums, bound))
        bound -= float(sums[digit - 1]) if digit else 0.0
        inside = torch.eq(digits, digit, out=scratch.take("inside", digits, torch.bool))
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
