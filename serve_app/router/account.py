"""One tenant's limits at a router: what was reserved, who waits for more, and what who is refused is told."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serve_app.core.errors import OutOfBudget, QuotaExceeded
from serve_app.core.tenants import GAUGES, NANO, SETTLED, Amount, Amounts, Meter, Statement, Tenant, bounds_of
from serve_app.router.appointments import MAX_RETRY_S, OBEYED_S, Appointments
from serve_app.tenants.meters import MINUTE_S
from serve_app.tenants.wallet import Wallet

NUM_ENDS, ENDS_S = 16, 10.0
"""Of requests, the last ones and not longer ago, by which it is told how fast they end."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How a limit per minute stands. reset_s: until the whole limit is there again"""

    limit: int
    remaining: int
    reset_s: float


Rates = Mapping[Meter, Rate]
"""Of requests and of tokens per minute, those that are limited."""


class Permit:
    """What one request has reserved; whoever has it settles it once, or more often in vain.

    parts:   tokens of that which are for the prompt, and for all completions, of each
    is_over: is called when it is settled
    """

    def __init__(
        self,
        wallet: Wallet,
        reserved: Amounts,
        *,
        parts: Sequence[tuple[int, int]] = (),
        clock: Clock = time.monotonic,
        is_over: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts = parts
        self._wallet = wallet
        self._reserved = reserved
        self._clock = clock
        self._is_over = is_over
        self._minute_ends, self._ends = clock() + MINUTE_S, wallet.ends

    def settle(self, spent: Amount) -> None:
        """Give back what was not spent, of the minute, day and month that it was reserved in and of no later one; where
        more was, it is taken from what comes next.
        """
        reserved, self._reserved = self._reserved, {}
        left, now = spent.over(reserved), self._clock()
        for meter, held in reserved.items():  # a comprehension is a call more
            left[meter] = held if meter in GAUGES else held - left[meter]
            if meter not in GAUGES and left[meter] > 0 and self._ends.get(meter, self._minute_ends) <= now:
                left[meter] = 0
        if reserved:
            self._wallet.settle(reserved, left)
            self._is_over()


FREE = Permit(Wallet(), {})
"""Of a tenant without limits."""


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    need: Amounts
    reserved: asyncio.Future[bool]


class Account:
    """One tenant's wallet, and who waits for more in it. num_patient: of those, for what others may give back"""

    def __init__(self, tenant: Tenant, clock: Clock) -> None:
        self.tenant = tenant
        self.bounds = bounds_of(tenant.limits)
        self.wallet = Wallet()
        self.waiting: list[Waiting] = []
        self.num_patient = 0
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)
        self._appointments = {
            meter: Appointments(max_s=MAX_RETRY_S, clock=clock, jitter=random.random) for meter in Meter
        }

    def become(self, tenant: Tenant) -> None:
        """Go by what the tenant is now."""
        self.tenant, self.bounds = tenant, bounds_of(tenant.limits)

    @property
    def needs_renewal(self) -> bool:
        return bool(self.waiting) or not self.wallet.is_idle

    def statement(self) -> Statement:
        """What is used, and what is wanted for those who wait."""
        wanted: Counter[Meter] = Counter()
        for each in self.waiting:
            wanted.update(each.need)
        return self.wallet.statement(self.tenant.name, self.bounds, wanted, now=self._clock())

    def note_end(self) -> None:
        """A request of it is over."""
        self._ends.append(self._clock())

    def refusal(self, meter: Meter, need: Amounts) -> QuotaExceeded:
        """What is said to who finds too little left: nobody is told to come at the time of somebody else, nor before
        there is enough, unless that is later than clients obey. When a day or month begins anew is told as it is, but
        where requests that still run have reserved what is missing: those may come to less.
        """
        bound, now = self.bounds[meter], self._clock()
        wait_s = self.wallet.wait_s(meter, now)
        if meter in SETTLED and self.wallet.is_only_reserved(meter, need[meter]):
            at = self._appointments[meter].make(pace_per_s=self._pace_per_s(1.0))
            return QuotaExceeded(
                f"What is left of the tenant's {meter} is reserved by requests that still run; retry in {at} s.",
                None,
                {"limit": meter.value, "retry_after_s": at},
            )
        if meter.is_budget:
            when = math.ceil(self.wallet.reset_s(meter, now))
            left, most = self.wallet.remaining(meter) / NANO, need[meter] / NANO
            what = f"has {left:g} left, and the request may come to {most:g}" if left else "is spent"
            return OutOfBudget(
                f"The tenant's {meter} {what}; it begins anew in {when} s.",
                None,
                {"limit": meter.value, "retry_after_s": when},
            )
        pace_per_s = max(bound, 1) / (1 if meter.is_gauge else MINUTE_S) / max(1, need[meter])
        if meter.is_gauge:
            pace_per_s = self._pace_per_s(pace_per_s)
        appointment = self._appointments[meter].make(pace_per_s=pace_per_s, excess_s=wait_s)
        at = max(appointment, math.ceil(min(wait_s, OBEYED_S)))
        return QuotaExceeded(
            f"The tenant's {meter}, {bound}, has {self.wallet.remaining(meter)} left, and the request needs"
            f" {need[meter]}; retry in {at} s.",
            None,
            {"limit": meter.value, "retry_after_s": at},
        )

    def _pace_per_s(self, guess: float) -> float:
        """At which requests of it end, as far as was seen of late."""
        now = self._clock()
        while self._ends and self._ends[0] < now - ENDS_S:
            self._ends.popleft()
        if len(self._ends) < 2:
            return guess
        return (len(self._ends) - 1) / max(now - self._ends[0], 1e-3)

    def serve(self, num_asked: int, now: float) -> None:
        """Let those who were asked for have what is there now, in their order; the others are told that it is not.

        num_asked: of those who wait, the first
        """
        asked, self.waiting = self.waiting[:num_asked], self.waiting[num_asked:]
        for each in asked:
            if not each.reserved.done():
                each.reserved.set_result(self.wallet.take(each.need, now))
