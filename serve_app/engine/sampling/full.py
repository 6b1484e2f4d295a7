"""Rows with every token of the vocabulary in view, in no order: for what the likeliest few do not tell."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_app.engine.sampling.selection import keep_until
from serve_app.engine.sampling.whole import (
    at_least,
    deviation_of,
    entropy_of,
    in_play,
    infinite_where_not,
    row_sums,
    weights_of,
)


class FullRows:
    """A few rows on their way through the chain.

    logits:  [rows, vocab] float32 as they came to the chain; -inf is out of play
    scaled:  [rows, vocab] float64, divided by the temperatures so far; -inf, too, is what was dropped from above others
    kept:    [rows, vocab] float64, 1 in play, 0 not
    divisor: [rows] float64, the temperature applied so far
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits + 0.0  # no -0.0, which equals 0.0 in all but its bits
        self.divisor = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
        self.scaled = self.logits.double()
        self.kept = in_play(logits)
        self._weights: Tensor | None = None
        self._reference = self.divisor

    @property
    def highest(self) -> Tensor:
        """[rows] the highest scaled logit in play."""
        return self.scaled.amax(-1)

    @property
    def num_kept(self) -> Tensor:
        """[rows] float64"""
        return row_sums(self.kept)

    @property
    def weights(self) -> Tensor:
        """[rows, vocab] float64, proportional to the probabilities; 0 is dropped."""
        return self._weighed()[0]

    @property
    def log_total(self) -> Tensor:
        """[rows] ln of the sum of exponentials of the scaled logits in play."""
        weights, reference = self._weighed()
        return reference + torch.log(row_sums(weights))

    @property
    def entropy(self) -> Tensor:
        """[rows] nats"""
        return entropy_of(self.scaled, *self._weighed())

    @property
    def deviation(self) -> Tensor:
        """[rows] the standard deviation of the scaled logits in play."""
        return deviation_of(self.scaled, self.kept)

    def divide(self, temperature: Tensor) -> None:
        """temperature: [rows] float64"""
        self.divisor = self.divisor * temperature
        if bool((temperature != 1.0).any()):
            self.scaled.div_(temperature[:, None])
        self._weights = None

    def keep(self, mask: Tensor) -> None:
        """Drop what is 0 in mask [rows, vocab] float64; the likeliest in play stays."""
        self.kept.mul_(mask)
        if self._weights is not None:
            self._weights.mul_(mask)

    def keep_any(self, mask: Tensor) -> None:
        """As `keep`, where the likeliest may go, and with it what the others are measured by."""
        self.kept.mul_(mask)
        self.scaled.add_(infinite_where_not(self.kept).neg_())
        self._weights = None

    def keep_from(self, lowest: Tensor) -> None:
        """Keep scaled logits of at least `lowest` [rows]."""
        self.keep(at_least(self.scaled, lowest))

    def first(self, weights: Tensor, bounds: Tensor) -> Tensor:
        """Those whose weights reach the bound, by falling logit, ties by rising id; a mask as `keep` takes it."""
        return keep_until(self.logits, weights, bounds, ties=self.logits)

    def _weighed(self) -> tuple[Tensor, Tensor]:
        """Weights, and what to add to the ln of one for its scaled logit."""
        if self._weights is None:
            self._reference = self.highest
            self._weights = weights_of(self.scaled, self._reference).mul_(self.kept)
        return self._weights, self._reference
