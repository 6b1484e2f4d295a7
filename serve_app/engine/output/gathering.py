"""Keeps what completions gain that nobody reads before their end, and passes it on a few times a second."""

from __future__ import annotations

import time
from collections.abc import Callable

from serve_app.core.delta import Delta, joined
from serve_app.engine.scheduler.sequence import Sequence

PERIOD_S = 0.2
"""Less than a person waits for a number on a console, and a score of steps of a small model."""
SILENCE_S = 2 * PERIOD_S
"""For so long routers are told nothing of what is spent unless there is something else to tell: what is gathered comes
in less.
"""


class Period:
    """At first it is over.  clock: seconds, monotonic"""

    def __init__(self, clock: Callable[[], float], length_s: float) -> None:
        self._clock = clock
        self._length_s = length_s
        self._ends_at = 0.0

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._ends_at

    def begin(self) -> None:
        """Begin anew, over or not."""
        self._ends_at = self._clock() + self._length_s


class Gathering:
    """What a router gets of a completion in every step costs it as much whether it is sent on or kept. So of those that
    are answered whole the first delta goes at once, the others together: when one of them ends, or a period is over,
    which is for all of them at the same step.

    clock: seconds, monotonic
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._period = Period(clock, PERIOD_S)
        self._is_due = True

    def begin(self) -> None:
        """A step's deltas come now."""
        self._is_due = self._period.is_over
        if self._is_due:
            self._period.begin()

    def take(self, sequence: Sequence, deltas: list[Delta]) -> list[Delta]:
        """What is to be passed on of what it had gained before and gained now: [] or one, or an error behind it."""
        if not sequence.request.is_read_whole or len(deltas) != 1:
            return deltas
        (last,) = deltas
        gathered = [*sequence.gathered, last]
        if not (self._is_due or last.prompt or last.finish or last.error):
            sequence.gathered = gathered
            return []
        sequence.gathered = []
        if last.error is None:
            return [joined(gathered)]
        return [joined(gathered[:-1]), last] if len(gathered) > 1 else [last]
