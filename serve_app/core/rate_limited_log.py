"""Says when something that is worth a hundredth of all time, and no more, may be done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.01


class Seldom:
    """At first it may be done at once; then not before a hundred times as long as it took has passed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds, monotonic"""
        self._clock = clock
        self._next = clock()

    @property
    def is_time(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def doing(self) -> Iterator[None]:
        """Around what is done, whether it fails or not."""
        began = self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            self._next = ended + (ended - began) * (1 / SHARE - 1)
