"""What one router holds of one tenant's limits, and what it took of that."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Mapping

from serve_app.core.tenants import BUDGETS, GAUGES, RATES, SETTLED, Amounts, Lease, Meter, Statement
from serve_app.tenants.lending import MINUTE_S

SHARE = 8
"""Routers hold at most so small a part of each limit together beyond what is waited for: that is a lease."""
MAX_DENIAL_S = 0.25
"""What was said to be missing is believed for so long; those who come meanwhile are refused without asking again."""
NEVER_TOLD = Lease(granted={}, left={}, waits={}, resets={}, lasts_s=0.0, num_routers=sys.maxsize)


class LeasedLimits:
    """Taking is all or nothing. What was given back may be taken again.

    ends: of budgets, when the day or month ends that is counted now; another object after each lease
    now:  seconds, monotonic
    """

    def __init__(self) -> None:
        self._granted: Amounts = {}
        self._used: Counter[Meter] = Counter()
        self._reserved: Counter[Meter] = Counter()  # of that, by requests that may come to less
        self._demand: Counter[Meter] = Counter()
        self._denied_until: dict[Meter, float] = {}
        self.ends: Mapping[Meter, float] = {}
        self._past: deque[tuple[float, Amounts]] = deque([(-math.inf, {})])  # what was used by when, once a second
        self._told = NEVER_TOLD
        self._told_at = -math.inf

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing in it that another router could use, nothing in use, and nothing in demand."""
        held = any(granted > self._used[meter] for meter, granted in self._granted.items())
        return not (held or self._demand) and not any(self._used[meter] for meter in self._granted if meter in GAUGES)

    def is_valid(self, now: float) -> bool:
        """Whether what is in it may still be used."""
        return now < self._told_at + self._told.lasts_s

    def take(self, need: Mapping[Meter, int], now: float) -> bool:
        """Take all of it, or nothing and return False."""
        for meter, amount in need.items():
            self._demand[meter] += amount
        if not self.is_valid(now) or self.short(need):
            return False
        for meter, amount in need.items():  # Counter.update is made for other things, and slow
            self._used[meter] += amount
            if meter in SETTLED:
                self._reserved[meter] += amount
        return True

    def settle(self, taken: Mapping[Meter, int], left: Mapping[Meter, int]) -> None:
        """Put back what is left of what was taken by a request that is over."""
        for meter, amount in taken.items():
            self._used[meter] -= left[meter]
            if meter in SETTLED:
                self._reserved[meter] -= amount

    def short(self, need: Mapping[Meter, int]) -> list[Meter]:
        """The meters on which there is too little of this."""
        granted, used = self._granted, self._used
        return [meter for meter, amount in need.items() if amount and granted.get(meter, 0) - used[meter] < amount]

    def may_come(self, need: Mapping[Meter, int]) -> bool:
        """Whether all that is short may be with other routers, which do not need it or will not."""
        return all(
            need[meter] - self.remaining(meter) <= self._told.pending.get(meter, 0) for meter in self.short(need)
        )

    def is_only_reserved(self, meter: Meter, amount: int) -> bool:
        """Whether so much would be there if nobody came to spend what is reserved."""
        return amount - self.remaining(meter) <= self._told.pending.get(meter, 0) + self._reserved[meter]

    def has_too_much(self, bounds: Mapping[Meter, int]) -> bool:
        """Whether there is more in it than it keeps while there are other routers."""
        return any(
            self._granted.get(meter, 0) - self._used[meter] > self._most_spare(bound) for meter, bound in bounds.items()
        )

    @property
    def is_shared(self) -> bool:
        """Whether other routers have of the same limits."""
        return 1 < self._told.num_routers < NEVER_TOLD.num_routers

    def denied(self, need: Mapping[Meter, int], now: float) -> Meter | None:
        """The meter that is known to have too little left, wherever one asks."""
        if not self.is_valid(now):
            return None
        return next((meter for meter in self.short(need) if self._denied_until.get(meter, now) > now), None)

    def remaining(self, meter: Meter) -> int:
        """What is here and, as was told last, with nobody."""
        return max(0, self._granted.get(meter, 0) - self._used[meter] + self._told.left.get(meter, 0))

    def reset_s(self, meter: Meter, now: float) -> float:
        return max(0.0, self._told.resets.get(meter, 0.0) - (now - self._told_at))

    def wait_s(self, meter: Meter, now: float) -> float:
        return max(0.0, self._told.waits.get(meter, 0.0) - (now - self._told_at))

    def statement(
        self, tenant: str, bounds: Mapping[Meter, int], waiting: Mapping[Meter, int], *, now: float
    ) -> Statement:
        """Ask for what is waited for, and for twice what was in demand since the last time, but never for more than
        the share. What is beyond that is given up at once, so that it is used by nobody but who gets it.
        """
        wanted = {}
        spare = {meter: min(self._most_spare(bound), 2 * self._demand[meter]) for meter, bound in bounds.items()}
        for meter in bounds:
            wanted[meter] = waiting.get(meter, 0) + spare[meter]
            self._granted[meter] = min(self._granted.get(meter, 0), self._used[meter] + wanted[meter])
        for gone in self._granted.keys() - bounds.keys():
            del self._granted[gone]
        self._demand.clear()
        used = {meter: self._used[meter] for meter in bounds}
        reserved = {meter: self._reserved[meter] for meter in SETTLED & bounds.keys()}
        return Statement(
            tenant=tenant, used=used, wanted=wanted, spare=spare, recent=self._recent(used, now), reserved=reserved
        )

    def accept(self, lease: Lease, asked_at: float) -> None:
        """Take over what was answered to the last statement."""
        self._told, self._told_at = lease, asked_at
        self.ends = {meter: asked_at + lease.resets[meter] for meter in BUDGETS & lease.resets.keys()}
        self._granted = dict(lease.granted)
        self._denied_until = {
            meter: asked_at + min(wait_s, MAX_DENIAL_S) for meter, wait_s in lease.waits.items() if wait_s > 0
        }

    def _most_spare(self, bound: int) -> int:
        """Of such a limit, what is held beyond what is waited for."""
        return -(-bound // SHARE) // self._told.num_routers

    def _recent(self, used: Amounts, now: float) -> Amounts:
        """What was used within the last minute, or a second more. Nothing is between two statements of limits in use
        but half a second, so that a request need not be noted.
        """
        past = self._past
        while len(past) > 1 and past[1][0] <= now - MINUTE_S:
            past.popleft()
        rates = {meter: used[meter] for meter in RATES & used.keys()}
        if now >= past[-1][0] + 1:
            past.append((now, rates))
        return {meter: max(0, amount - past[0][1].get(meter, 0)) for meter, amount in rates.items()}
