"""Lends tenants' limits to routers: the one place where all that was taken of a limit is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from serve_app.core.tenants import BUDGETS, GAUGES, Amounts, Lease, Limits, Meter, Statement, bounds_of

LEASE_S = 5.0
"""A router that was not heard of for so long is taken for gone, and itself refuses by then."""
SHORT_S = 1.0
"""For so long after a router was given too little others get no more than they need at once: until all have renewed."""
KEPT_S = 900.0
"""For so long it is known what a router had that was gone or had nothing to say, should it come back."""

LimitsOf = Callable[[str], Limits]
SpentOf = Callable[[str, str], int]
"""What a tenant spent within a period, `2026-11-22` or `2026-11`, in billionths of the currency."""
Period = tuple[Meter, str]
"""Of a budget: which one, and its day or month."""

MINUTE_S = 60
MOMENT_S = 0.1
ROUNDING_S = 1e-9
"""By which times that are sums of others may be too early."""
DAY_S = 86_400
GAUGE_WAIT_S = 1.0
"""When a place in flight becomes free nobody knows; so long is worth waiting."""
MAX_PERIODS = 8
"""Of one budget, those counted last: more than a clock that is set to and fro goes through."""


@dataclass(slots=True)
class _Loan:
    """What one router has of one tenant's limits.

    pending: of that, what it does not need or may come not to need
    taken:   of budgets, in which period, the last one last
    """

    expires_at: float
    pending: Amounts = field(default_factory=dict)
    granted: Amounts = field(default_factory=dict)
    taken: dict[Meter, dict[str, int]] = field(default_factory=dict)

    def take(self, name: Meter, budget: Budget, amount: int, now: float) -> None:
        """Note that it was granted so much of what the budget has now."""
        taken, period = self.taken.setdefault(name, {}), budget.period(now)
        taken[period] = taken.pop(period, 0) + amount
        while len(taken) > MAX_PERIODS:
            del taken[next(iter(taken))]

    def give(self, name: Meter, budget: Budget, amount: int) -> None:
        """Put back what it needs no more, each part into the period that it is from, and nothing that is not known."""
        taken = self.taken.get(name, {})
        for period in reversed(list(taken)):
            part = min(amount, taken[period])
            budget.give(part, period)
            taken[period] -= part
            amount -= part


class Lending:
    """What is granted was taken from the tenant's meter before, so what all routers use stays within each limit. Where
    a router is gone, what it held of a gauge is lent again: should it still use that, the limit is exceeded by as much,
    and never by more. Of other meters it counts as used, until the router comes back and says that it is not. What was
    granted of a budget goes back to the day and month that it was taken in, and makes no room in later ones.

    limits_of: what a tenant has now; it may change
    clock:     seconds, monotonic;  wall: seconds since 1970
    spent_of:  what the ledger says, asked for what was not told before (`unread`): once per tenant, budget and life of
               this object, and where a clock that was ahead comes to a period that it had left out
    """

    def __init__(
        self,
        limits_of: LimitsOf,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        spent_of: SpentOf = lambda tenant, period: 0,
        lease_s: float = LEASE_S,
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._wall = wall
        self._spent_of = spent_of
        self._lease_s = lease_s
        self._meters: dict[tuple[str, Meter], AnyMeter] = {}
        self._loans: dict[tuple[str, str], _Loan] = {}  # the one that expires last is last
        self._by_tenant: dict[str, dict[str, _Loan]] = {}  # the same by tenant and router
        self._short: dict[tuple[str, Meter], tuple[str, float]] = {}  # who got too little, and until when that is known
        self._lapsed: dict[tuple[str, str], _Loan] = {}  # the one that lapsed last is last

    def unread(self, tenant: str) -> list[Period]:
        """Its budgets of which only the ledger knows what was spent, by now."""
        return [each for name, _ in self._bounds(tenant) if name in BUDGETS for each in self._unread(tenant, name)]

    def tell(self, tenant: str, period: Period, spent: int) -> None:
        """What the ledger says of what was unread; where more is known by now, that counts."""
        name, day_or_month = period
        budget = self._meters.get((tenant, name))
        if isinstance(budget, Budget):
            budget.tell(day_or_month, spent)
        else:
            is_monthly = name is Meter.MONTH
            self._meters[tenant, name] = Budget(0, is_monthly=is_monthly, period=day_or_month, spent=spent)

    def free(self, tenant: str) -> Amounts:
        """What of each of its limits nobody holds."""
        return {name: self._meter(tenant, name, bound).free(self._now(name)) for name, bound in self._bounds(tenant)}

    def renew(self, router_id: str, statement: Statement) -> Lease:
        """Grant what is wanted, as far as it is there, and take back what is wanted no more."""
        self._expire()
        now = self._clock()
        known = self._loan((router_id, statement.tenant), statement.used)
        known.expires_at = now + self._lease_s
        self._forget_short()
        waits = {
            meter: self._settle(router_id, statement, known, meter, bound)
            for meter, bound in self._bounds(statement.tenant)
        }
        known.pending = {
            meter: granted - (0 if meter in GAUGES else statement.used.get(meter, 0) - statement.reserved.get(meter, 0))
            for meter, granted in known.granted.items()
        }
        others = [loan for who, loan in self._by_tenant[statement.tenant].items() if who != router_id]
        free = self.free(statement.tenant)
        resets = {meter: self._meters[statement.tenant, meter].reset_s(self._now(meter)) for meter in free}
        return Lease(
            granted=dict(known.granted),
            left=free,
            waits=waits,
            resets=resets,
            lasts_s=self._lease_s,
            num_routers=1 + len(others),
            pending={meter: sum(loan.pending.get(meter, 0) for loan in others) for meter in free},
        )

    def _loan(self, key: tuple[str, str], used: Mapping[Meter, int]) -> _Loan:
        """The router's, which is the last to expire now. What it got from a window before it was gone counts as used:
        that minute may be over.
        """
        loan = self._loans.pop(key, None)
        if loan is None:
            loan = self._lapsed.pop(key, None) or _Loan(0.0)
            loan.granted = {
                name: amount if name in BUDGETS else used.get(name, 0) for name, amount in loan.granted.items()
            }
        self._loans[key] = self._by_tenant.setdefault(key[1], {})[key[0]] = loan
        return loan

    def _note_short(self, tenant: str, name: Meter, router_id: str, *, is_short: bool) -> None:
        """Whether somebody waits for it there, to whom what others have to spare is of more use."""
        if is_short:
            self._short.pop((tenant, name), None)  # those that were noted last are last
            self._short[tenant, name] = router_id, self._clock() + SHORT_S
        elif self._short.get((tenant, name), ("", 0.0))[0] == router_id:
            del self._short[tenant, name]

    def _forget_short(self) -> None:
        now = self._clock()
        while self._short and next(iter(self._short.values()))[1] <= now:
            del self._short[next(iter(self._short))]

    def _settle(self, router_id: str, statement: Statement, loan: _Loan, name: Meter, bound: int) -> float:
        """Bring one meter to what is wanted; how long to wait for what is missing.

        What a router that nothing is known of took within the last minute counts as if it were taken now.
        """
        meter, now = self._meter(statement.tenant, name, bound), self._now(name)
        used, wanted = statement.used.get(name, 0), statement.wanted.get(name, 0)
        if self._short.get((statement.tenant, name), (router_id, now))[0] != router_id:
            wanted -= statement.spare.get(name, 0)
        if name not in loan.granted:  # what the router took was before; what is in flight and of this minute is there
            loan.granted[name] = used
            meter.take(used if name in GAUGES else statement.recent.get(name, 0), now)
        missing = used + wanted - loan.granted[name]
        if missing < 0:
            if isinstance(meter, Budget):
                loan.give(name, meter, -missing)
            else:
                meter.give(-missing, now)
            loan.granted[name] += missing
            return 0.0
        granted = min(missing, meter.free(now))
        meter.take(granted, now)
        if isinstance(meter, Budget):
            loan.take(name, meter, granted, now)
        loan.granted[name] += granted
        if waited_for := statement.wanted.get(name, 0) - statement.spare.get(name, 0):
            is_short = loan.granted[name] < used + waited_for
            self._note_short(statement.tenant, name, router_id, is_short=is_short)
        return meter.wait_s(missing - granted, now)

    def _expire(self) -> None:
        """Of who was not heard of, what was in flight is lent again; what else it had is kept in mind for a while."""
        now = self._clock()
        while self._loans and (first := next(iter(self._loans.items())))[1].expires_at <= now:
            (router_id, tenant), loan = first
            self._lapsed[first[0]] = self._loans.pop(first[0])
            del self._by_tenant[tenant][router_id]
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
            for name in GAUGES & loan.granted.keys():
                gauge, granted = self._meters.get((tenant, name)), loan.granted.pop(name)
                if isinstance(gauge, Gauge):
                    gauge.give(granted, now)
        while self._lapsed and (oldest := next(iter(self._lapsed.items())))[1].expires_at + KEPT_S <= now:
            del self._lapsed[oldest[0]]

    def _bounds(self, tenant: str) -> list[tuple[Meter, int]]:
        return list(bounds_of(self._limits_of(tenant)).items())

    def _meter(self, tenant: str, name: Meter, bound: int) -> AnyMeter:
        for period in self._unread(tenant, name) if name in BUDGETS else ():
            self.tell(tenant, period, self._spent_of(tenant, period[1]))
        meter = self._meters.get((tenant, name))
        if meter is None:
            meter = self._meters[tenant, name] = Gauge(bound) if name in GAUGES else Window(bound)
        meter.limit = bound
        return meter

    def _unread(self, tenant: str, name: Meter) -> list[Period]:
        """Nothing, or the period of now."""
        budget, period = self._meters.get((tenant, name)), period_of(self._wall(), is_monthly=name is Meter.MONTH)
        return [] if isinstance(budget, Budget) and budget.knows(period) else [(name, period)]

    def _now(self, meter: Meter) -> float:
        return self._wall() if meter in BUDGETS else self._clock()


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
