"""Measures how fast sequences complete, and tells clients that were refused when to come again."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

JITTER = 0.25
"""Clients are told to come up to so much later than their appointments: those told at once do not come at once."""
MIN_RETRY_S = 1.0
OBEYED_S = 60.0
"""Clients, as OpenAI's own, wait for no longer than that as they are told: beyond it they come after seconds."""
MAX_RETRY_S = OBEYED_S / (1 + JITTER)
"""The longest time before jitter, so that no client is told one that it would not obey."""


class Appointments:
    """A book of one line: when the client that was refused last was told to come.

    max_s:  nobody is sent away for longer, jitter left out
    jitter: gives a number from 0 to 1

    Each appointment is one completion later than the one before, at the pace at which requests complete. Clients that
    keep them come as fast as places become free: fewer would leave places empty, more would be refused again. Where the
    book is full they come up to `max_s` later all the same; to refuse them once more is cheaper than to have nobody
    there when it goes faster than was thought.
    """

    def __init__(
        self,
        *,
        max_s: float,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._max_s = max_s
        self._clock = clock
        self._jitter = jitter
        self._last_at = 0.0

    def make(self, *, pace_per_s: float, excess_s: float = 0.0) -> int:
        """Return the whole seconds until the next appointment, which is after `excess_s` at the earliest."""
        now = self._clock()
        earliest = max(self._last_at, now + excess_s) + 1 / pace_per_s
        self._last_at = min(earliest, now + self._max_s)
        told_s = math.ceil(max(MIN_RETRY_S, (self._last_at - now) * (1 + JITTER * self._jitter())))
        return min(told_s, math.ceil(self._max_s * (1 + JITTER)))


MEMORY_S = 20.0
"""Busy seconds after which a measurement weighs e times less."""
BELIEF_S = 5.0
"""Busy seconds that the belief from before any measurement weighs as much as."""


class Pace:
    """A rate in sequences per second, over busy time alone: an idle replica completes only what it is asked for.

    Before anything is measured the replicas are believed to keep the pace they are given as `belief`. It fades as
    busy time goes by, with or without completions.
    """

    def __init__(self, belief: float, *, now: float) -> None:
        assert belief > 0, "a pace of nothing predicts nothing"
        self._num_completed = belief * BELIEF_S
        self._busy_s = BELIEF_S
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
