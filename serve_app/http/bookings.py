"""The appointments of a flow's refused requests, and how many of them are about to be kept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from serve_app.router.appointments import Appointments

GRACE_S = 2
"""After which whoever did not come is not waited for."""


class Bookings:
    """max_s: nobody is sent away for longer, jitter left out"""

    def __init__(self, *, max_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._appointments, self._others = (Appointments(max_s=max_s, clock=clock) for _ in range(2))
        self._by_second: Counter[int] = Counter()

    def make(self, *, pace_per_s: float, excess_s: float = 0.0, is_kept: bool = True) -> int:
        """Whole seconds until the next one, which is after `excess_s` at the earliest.

        is_kept: whether somebody is awaited then; others are told times of their own, one after the other as well
        """
        if not is_kept:
            return self._others.make(pace_per_s=pace_per_s, excess_s=excess_s)
        retry_after_s = self._appointments.make(pace_per_s=pace_per_s, excess_s=excess_s)
        self._by_second[int(self._clock()) + retry_after_s] += 1
        return retry_after_s

    @property
    def num_due(self) -> int:
        """Who may come now, and has not come yet."""
        now = int(self._clock())
        for second in [second for second in self._by_second if second < now - GRACE_S]:
            del self._by_second[second]
        return sum(self._by_second[second] for second in range(now - GRACE_S, now + 1))

    def cancel(self, at: float) -> None:
        """Whoever was told to come then has come already."""
        for second in (int(at), int(at) - 1):  # clocks of two loops differ by the beginning of a second
            if self._by_second[second]:
                self._by_second[second] -= 1
                return

    def keep(self) -> bool:
        """Somebody has come: whether one of those who may come now."""
        now = int(self._clock())
        for second in range(now - GRACE_S, now + 1):
            if self._by_second[second]:
                self._by_second[second] -= 1
                return True
        return False
