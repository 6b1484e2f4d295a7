"""Measures how fast replicas complete sequences while they have more than they can compute together."""

from __future__ import annotations

import math

MEMORY_S = 20.0
"""Busy seconds after which a measurement weighs e times less."""
BELIEF_S = 5.0
"""Busy seconds that the belief from before any measurement weighs as much as."""


class Pace:
    """A rate in sequences per second, over busy time alone: an idle replica completes only what it is asked for.

    Before anything is measured the replicas are believed to keep the pace they are given as `belief`. It fades as
    busy time goes by, with or without completions.
    """

    def __init__(self, belief: float, *, now: float, belief_s: float = BELIEF_S) -> None:
        """belief_s: busy seconds that the belief weighs as much as"""
        assert belief > 0, "a pace of nothing predicts nothing"
        self._num_completed = belief * belief_s
        self._busy_s = belief_s
        self._noted_at = now

    @property
    def per_s(self) -> float:
        return max(self._num_completed, 1.0) / self._busy_s

    def note(self, now: float, *, is_busy: bool, num_completed: int = 0) -> None:
        """Note what happened since the last call; is_busy: more than a batch was there all the while."""
        if is_busy:
            elapsed = max(0.0, now - self._noted_at)
            fading = math.exp(-elapsed / MEMORY_S)
            self._num_completed = self._num_completed * fading + num_completed
            self._busy_s = self._busy_s * fading + elapsed
        self._noted_at = now
