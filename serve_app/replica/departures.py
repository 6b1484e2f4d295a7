"""Predicts how long a replica's queue takes to make room, from how fast sequences left it lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW = 64
MIN_WAIT_S = 1.0
MAX_WAIT_S = 60.0


class Departures:
    """Remembers when the last sequences ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=WINDOW)

    def note(self) -> None:
        self._times.append(self._clock())

    def wait_s(self, num_sequences: int) -> int:
        """Whole seconds until so many more have left, 1 to 60; 1 where too few have left to tell."""
        if len(self._times) < 2:
            return int(MIN_WAIT_S)
        span_s = self._clock() - self._times[0]
        predicted = span_s / (len(self._times) - 1) * num_sequences
        return round(min(max(predicted, MIN_WAIT_S), MAX_WAIT_S))
