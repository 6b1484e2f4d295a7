"""Meters: how much of one limit is free, after what was taken and given back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache

MINUTE_S = 60
MOMENT_S = 0.1
ROUNDING_S = 1e-9
"""By which times that are sums of others may be too early."""
DAY_S = 86_400
GAUGE_WAIT_S = 1.0
"""When a place in flight becomes free nobody knows; so long is worth waiting."""
MAX_PERIODS = 8
"""Of one budget, those counted last: more than a clock that is set to and fro goes through."""


class Window:
    """At most so much within any minute, not only within those of the clock.

    A bucket that refills would let twice the limit through within a minute that begins with a full one. What was taken
    within a tenth of a second counts as taken at the last moment of it, so that this takes at most 602 entries whatever
    is asked, and nobody is to wait for more than a minute, which is what clients obey. What is given back is taken off
    the oldest, which errs on the side of the limit.

    limit: may be changed;  now: seconds, monotonic
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken: deque[_Taken] = deque()
        self._total = 0

    def free(self, now: float) -> int:
        """What may be taken."""
        self._forget(now)
        return max(0, self.limit - self._total)

    def take(self, amount: int, now: float) -> None:
        self._forget(now)
        if not amount:
            return
        if not self._taken or self._taken[-1].began_at + MOMENT_S <= now:
            self._taken.append(_Taken(now, now, 0))
        last = self._taken[-1]
        last.at = max(last.at, now)
        last.amount += amount
        self._total += amount

    def give(self, amount: int, now: float) -> None:
        self._forget(now)
        while amount > 0 and self._taken:
            part = min(amount, self._taken[0].amount)
            self._taken[0].amount -= part
            self._total -= part
            amount -= part
            if not self._taken[0].amount:
                self._taken.popleft()

    def wait_s(self, amount: int, now: float) -> float:
        """Until so much is free, if nothing is taken meanwhile."""
        missing = amount - self.free(now)
        for each in self._taken if missing > 0 else ():
            missing -= each.amount
            if missing <= 0:
                return each.leaves_in_s(now)
        return 0.0 if missing <= 0 else float(MINUTE_S)

    def reset_s(self, now: float) -> float:
        """Until the whole limit is free."""
        self._forget(now)
        return self._taken[-1].leaves_in_s(now) if self._taken else 0.0

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0].at <= now - MINUTE_S:
            self._total -= self._taken.popleft().amount


@dataclass(slots=True)
class _Taken:
    """What was taken within a moment, and when the moment began and ended."""

    began_at: float
    at: float
    amount: int

    def leaves_in_s(self, now: float) -> float:
        """Until it is a minute past."""
        wait_s = self.at + MINUTE_S - now
        return wait_s if now + wait_s - MINUTE_S >= self.at else wait_s + ROUNDING_S


class Gauge:
    """At most so much at one moment."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0

    def free(self, now: float) -> int:
        return max(0, self.limit - self._taken)

    def take(self, amount: int, now: float) -> None:
        self._taken += amount

    def give(self, amount: int, now: float) -> None:
        self._taken = max(0, self._taken - amount)

    def wait_s(self, amount: int, now: float) -> float:
        return GAUGE_WAIT_S if amount > self.free(now) else 0.0

    def reset_s(self, now: float) -> float:
        return GAUGE_WAIT_S if self._taken else 0.0


class Budget:
    """At most so much from the beginning of a day or a month, UTC.

    What was taken is kept by its period, so that a clock that is set ahead and back finds what it left, and begins
    nothing anew. A period earlier than all that are known is not begun before it is told what was spent in it.

    now: seconds since 1970
    """

    def __init__(self, limit: int, *, is_monthly: bool, period: str = "", spent: int = 0) -> None:
        """period, spent: what was spent already, and when"""
        self.limit = limit
        self._is_monthly = is_monthly
        self._period = period
        self._spent = {period: spent}

    def knows(self, period: str) -> bool:
        """Whether what was spent within it is known here; of later ones it is, as nothing was."""
        return period in self._spent or period > max(self._spent)

    def tell(self, period: str, spent: int) -> None:
        """What was spent within a period that is not known."""
        if not self.knows(period):
            self._spent[period] = spent

    def free(self, now: float) -> int:
        return max(0, self.limit - self._spent[self.period(now)])

    def take(self, amount: int, now: float) -> None:
        self._spent[self.period(now)] += amount

    def give(self, amount: int, period: str) -> None:
        """Of what was taken within that period. Of one that is forgotten nobody asks any more."""
        if period in self._spent:
            self._spent[period] = max(0, self._spent[period] - amount)

    def wait_s(self, amount: int, now: float) -> float:
        return self.reset_s(now) if amount > self.free(now) else 0.0

    def reset_s(self, now: float) -> float:
        today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        month = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
        return (month if self._is_monthly else today + timedelta(days=1)).timestamp() - now

    def period(self, now: float) -> str:
        """The one that is counted now."""
        period = period_of(now, is_monthly=self._is_monthly)
        if period != self._period and self.knows(period):
            self._period = period
            self._spent[period] = self._spent.pop(period, 0)
            while len(self._spent) > MAX_PERIODS:
                del self._spent[next(iter(self._spent))]
        return self._period


AnyMeter = Window | Gauge | Budget


def period_of(now: float, *, is_monthly: bool) -> str:
    """The day as `2026-11-22`, or the month as `2026-11`, that a Unix time is in, UTC."""
    return _period_of_day(int(now // DAY_S), is_monthly=is_monthly)


@lru_cache(maxsize=64)
def _period_of_day(day: int, *, is_monthly: bool) -> str:
    """day: since the first of 1970, each of as many seconds"""
    return datetime.fromtimestamp(day * DAY_S, UTC).strftime("%Y-%m" if is_monthly else "%Y-%m-%d")
