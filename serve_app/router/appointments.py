"""Tells clients that were refused when to come again, so that they come no faster than they can be served."""

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
