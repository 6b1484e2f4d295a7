"""A row with every token of the vocabulary in view, in no order: for what the likeliest few do not tell."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from serve_app.engine.sampling.candidates import largest
from serve_app.engine.sampling.scratch import Scratch
from serve_app.engine.sampling.selection import MAX_SORTED, keep_until
from serve_app.engine.sampling.whole import at_least, deviation_of, entropy_of, in_play, row_sums, weights_of


class FullRow:
    """A row on its way through the chain; everything large is scratch, so there is one at a time.

    logits:  [1, vocab] float32 as they came to the chain; -inf is out of play
    scaled:  [1, vocab] float64, divided by the temperatures so far; -inf, too, is what was dropped from above others
    kept:    [1, vocab] float64, 1 in play, 0 not
    divisor: [1] float64, the temperature applied so far
    token_ids: [n] int64, what is in view since `narrow` found it to be few; everything else is [1, n] then, not
             [1, vocab]. None is the whole vocabulary
    """

    def __init__(self, logits: Tensor, scratch: Scratch) -> None:
        assert len(logits) == 1, "rows share their scratch"
        self.scratch = scratch
        self.logits = scratch.copy("logits", logits, torch.float32).add_(0.0)  # no -0.0, which equals 0.0 but for bits
        self.divisor = torch.ones(1, dtype=torch.float64, device=logits.device)
        self.scaled = scratch.copy("scaled", self.logits, torch.float64)
        self.token_ids: Tensor | None = None
        self._kept: Tensor | None = None  # all of them
        if float(self.logits.amin()) == -inf:
            self._kept = scratch.copy("kept", in_play(self.logits, scratch), torch.float64)
        self._weights: Tensor | None = None
        self._reference = self.divisor

    @property
    def kept(self) -> Tensor:
        if self._kept is None:
            self._kept = self.scratch.take("kept", self.scaled, torch.float64).fill_(1.0)
        return self._kept

    @property
    def highest(self) -> Tensor:
        """[1] the highest scaled logit in play."""
        return self.scaled.amax(-1)

    @property
    def num_kept(self) -> Tensor:
        """[1] float64"""
        if self._kept is None:
            return torch.full_like(self.divisor, self.scaled.shape[-1])
        return row_sums(self._kept)

    @property
    def kept_ids(self) -> Tensor:
        """[n] int64 the tokens in play, by rising id."""
        columns = torch.nonzero(self.kept[0])[:, 0]
        return columns if self.token_ids is None else self.token_ids[columns]

    @property
    def weights(self) -> Tensor:
        """[1, vocab] float64, proportional to the probabilities; 0 is dropped."""
        return self._weighed()[0]

    @property
    def log_total(self) -> Tensor:
        """[1] ln of the sum of exponentials of the scaled logits in play."""
        weights, reference = self._weighed()
        return reference + torch.log(row_sums(weights))

    @property
    def entropy(self) -> Tensor:
        """[1] nats"""
        return entropy_of(self.scaled, *self._weighed(), self.scratch)

    @property
    def deviation(self) -> Tensor:
        """[1] the standard deviation of the scaled logits in play."""
        return deviation_of(self.scaled, self.kept, self.scratch)

    def divide(self, temperature: Tensor) -> None:
        """temperature: [1] float64"""
        self.divisor = self.divisor * temperature
        if bool((temperature != 1.0).any()):
            self.scaled.div_(temperature[:, None])
        self._weights = None

    def keep(self, mask: Tensor) -> None:
        """Drop what is 0 in mask [1, vocab] float64; the likeliest in play stays."""
        if self._kept is None:
            self._kept = self.scratch.copy("kept", mask, torch.float64)
        else:
            self._kept.mul_(mask)
        if self._weights is not None:
            self._weights.mul_(mask)

    def keep_any(self, mask: Tensor) -> None:
        """As `keep`, where the likeliest may go, and with it what the others are measured by."""
        self.kept.mul_(mask)
        infinite = torch.sub(self.kept, 1.0, out=self.scratch.take("infinite", mask, torch.float64)).div_(self.kept)
        self.scaled.add_(infinite)  # 0/1 where kept, -1/0 where not
        self._weights = None

    def narrow(self) -> None:
        """Leave what is dropped out of view where few tokens are left; nothing else changes."""
        if self.token_ids is not None or self._kept is None or float(self.num_kept) > MAX_SORTED:
            return
        self.token_ids = torch.nonzero(self._kept[0])[:, 0]
        self.logits, self.scaled = self.logits[:, self.token_ids], self.scaled[:, self.token_ids]
        if self._weights is not None:
            self._weights = self._weights[:, self.token_ids]
        self._kept = None

    def keep_from(self, lowest: Tensor) -> None:
        """Keep scaled logits of at least `lowest` [1]."""
        self.keep(self.at_least(lowest))

    def at_least(self, lowest: Tensor) -> Tensor:
        """1 where a scaled logit reaches `lowest` [1], else 0; a mask as `keep` takes it, scratch's "mask"."""
        return at_least(self.scaled, lowest, self.scratch.take("mask", self.scaled, torch.float64))

    def likeliest(self, count: int) -> Tensor:
        """[1, count] scaled logits of the likeliest tokens, in play or not, by falling value."""
        return largest(self.logits, min(count, self.logits.shape[-1])).double() / self.divisor[:, None]

    def first(self, weights: Tensor, bound: Tensor) -> Tensor:
        """Those whose weights reach the bound [1], by falling logit, ties by rising id; as `keep_until` gives it."""
        return keep_until(self.logits, weights, float(bound), ties=None, scratch=self.scratch)

    def nearest(self, distances: Tensor, bound: Tensor) -> Tensor:
        """Those whose weights reach the bound [1], by rising distance [1, n], of equals the likelier; a mask.

        distances: changed
        """
        return keep_until(distances.neg_(), self.weights, float(bound), ties=self.logits, scratch=self.scratch)

    def unless_enough(self, mask: Tensor, count: Tensor, distances: Tensor | None) -> Tensor:
        """The mask, which keeps one token at least, if it keeps `count` [1], else with the likeliest, or the nearest.

        distances: as `nearest` left them
        """
        number = float(count)
        if number <= 1.0:
            return mask
        own = torch.mul(mask, self.kept, out=self.scratch.take("own", mask, torch.float64))
        if float(row_sums(own)) >= number:
            return mask
        before = self.scratch.copy("other mask", mask, torch.float64)
        keys, ties = (self.logits, None) if distances is None else (distances, self.logits)
        return torch.maximum(before, keep_until(keys, self.kept, number, ties=ties, scratch=self.scratch), out=before)

    def drop_all_but_last(self, above: Tensor) -> None:
        """Of the tokens of a mask, which are the likeliest, leave the one that is last in their order."""
        is_not = torch.sub(1.0, above, out=self.scratch.take("own", above, torch.float64))
        heights = is_not.div_(above).add_(self.scaled).nan_to_num_(nan=inf, posinf=inf)  # infinite where not above
        last = torch.nonzero(heights[0] == heights.amin())[-1]
        mask = above.neg_().add_(1.0)
        mask[0, last] = 1.0
        self.keep_any(mask)

    def _weighed(self) -> tuple[Tensor, Tensor]:
        """Weights, and what to add to the ln of one for its scaled logit."""
        if self._weights is None:
            self._reference = self.highest
            buffer = self.scratch.take("weights", self.scaled, torch.float64)
            self._weights = weights_of(self.scaled, self._reference, buffer)
            if self._kept is not None:
                self._weights.mul_(self._kept)
        return self._weights, self._reference
