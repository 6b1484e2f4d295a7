"""Reserves what a request may come to from its tenant's limits, and settles what it came to."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from serve_app.api.listings import LimitState
from serve_app.core.errors import InvalidRequest, OutOfBudget, QuotaExceeded, Unavailable
from serve_app.core.tenants import (
    BUDGETS,
    COUNTS_REQUESTS,
    GAUGES,
    NANO,
    SETTLED,
    Amount,
    Amounts,
    Meter,
    Statement,
    Tenant,
    bounds_of,
)
from serve_app.router.accounts import AccountsClient
from serve_app.router.appointments import MAX_RETRY_S, OBEYED_S, Appointments
from serve_app.router.patience import begin, patience
from serve_app.tenants.leased_limits import LeasedLimits
from serve_app.tenants.lending import MINUTE_S

logger = logging.getLogger(__name__)

RENEW_S = 0.5
"""So often a router says what it used, and gives back what it needs no more."""
ANSWER_S = 1.0
"""A lender that does not answer for so long is taken for gone."""
MIN_RETRY_S = 1
AGAIN_S = (0.05, 0.1, 0.2, 0.25)
"""After which the lender is asked again, before a request is refused, for what other routers give back meanwhile: until
all of them have renewed, and a little longer."""
MOST_PATIENT = 32
"""Requests of a tenant that wait so at once; more are refused as they come."""
SOON_S = 0.02
"""After which more than a router keeps is given back, where others may want it."""


class Quotas:
    """Asks the lender only where the router holds too little, at once for all who wait meanwhile.

    While the lender cannot be reached, requests are served from what is held for as long as the lease lasts.
    clock: seconds, monotonic
    """

    def __init__(self, router_id: str, lender: AccountsClient, *, clock: Clock = time.monotonic) -> None:
        self._router_id = router_id
        self._lender = lender
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._renewal: asyncio.Task[None] | None = None
        self._soon: asyncio.Task[None] | None = None
        self._is_reached = True

    def bounds(self, tenant: Tenant) -> Mapping[Meter, int]:
        """As `bounds_of` its limits, which are looked at once per change of the tenant."""
        account = self._accounts.get(tenant.name)
        return account.bounds if account is not None and account.tenant is tenant else bounds_of(tenant.limits)

    async def reserve(self, tenant: Tenant, amount: Amount, *, parts: Sequence[tuple[int, int]] = ()) -> Permit:
        """parts: see Permit

        Raises QuotaExceeded where a limit has too little left now, InvalidRequest where it never has so much, and
        Unavailable where that cannot be found out.
        """
        bounds = self.bounds(tenant)
        if not bounds:
            return FREE
        account, need = self._account(tenant), amount.over(bounds)
        _check_possible(need, bounds)
        leased, now = account.leased, self._clock()
        if not account.waiting and leased.take(need, now):
            return self._permit(account, need, parts)
        denied = leased.denied(need, now)
        if denied is not None and not self._is_worth_waiting(account, need):
            raise account.refusal(denied, need)
        if await self._wait(account, need) or await self._wait_for_others(account, need):
            return self._permit(account, need, parts)
        if not (self._is_reached and leased.is_valid(self._clock())):
            raise Unavailable(
                "What is left of the limits is not known now; retry.", None, {"retry_after_s": MIN_RETRY_S}
            )
        raise account.refusal(next(iter(leased.short(need)), next(iter(need))), need)

    def rates(self, tenant: Tenant) -> Rates:
        """How the tenant's limits per minute stand, as far as this router was told, and not too long ago."""
        account, now = self._accounts.get(tenant.name), self._clock()
        if account is None or not account.leased.is_valid(now):
            return {}
        bounds = self.bounds(tenant)
        return {
            meter: LimitState(
                limit=bounds[meter],
                remaining=min(bounds[meter], account.leased.remaining(meter)),
                reset_s=account.leased.reset_s(meter, now),
            )
            for meter in (Meter.REQUESTS, Meter.TOKENS)
            if meter in bounds
        }

    async def run(self) -> None:
        """Renew for ever what is held or in use."""
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Renew everything that is not idle; a renewal that runs already will do."""
        await asyncio.shield(self._renewing())

    def _renewing(self) -> asyncio.Task[None]:
        if self._renewal is None:
            self._renewal = begin(self._renew())
        return self._renewal

    def _permit(self, account: Account, need: Amounts, parts: Sequence[tuple[int, int]]) -> Permit:
        return Permit(account.leased, need, parts=parts, clock=self._clock, is_over=partial(self._end_one, account))

    def _end_one(self, account: Account) -> None:
        """What a request has left over is wanted elsewhere, if anybody shares these limits."""
        account.note_end()
        if self._soon is None and account.leased.is_shared and account.leased.has_too_much(account.bounds):
            self._soon = begin(self._renew_soon())

    async def _renew_soon(self) -> None:
        await asyncio.sleep(SOON_S)
        self._soon = None
        await self.renew()

    def _is_worth_waiting(self, account: Account, need: Amounts) -> bool:
        """Whether other routers may give back what is short, and few wait for that."""
        return account.num_patient < MOST_PATIENT and account.leased.may_come(need)

    async def _wait_for_others(self, account: Account, need: Amounts) -> bool:
        """Whether it could be taken, after asking again for a while."""
        if not self._is_worth_waiting(account, need):
            return False
        account.num_patient += 1
        try:
            for pause_s in AGAIN_S:
                await asyncio.sleep(pause_s)
                if await self._wait(account, need):
                    return True
                if not account.leased.may_come(need):
                    return False
            return False
        finally:
            account.num_patient -= 1

    async def _wait(self, account: Account, need: Amounts) -> bool:
        """Whether it could be taken, after asking for it."""
        waiting = Waiting(need=need, reserved=asyncio.get_running_loop().create_future())
        account.waiting.append(waiting)
        self._renewing()
        try:
            return await waiting.reserved
        except asyncio.CancelledError:
            if not waiting.reserved.cancelled() and waiting.reserved.result():
                account.leased.settle(need, need)
            raise

    async def _renew(self) -> None:
        await asyncio.sleep(0)  # who comes in the same turn of the loop is asked for along
        asked = {account: len(account.waiting) for account in self._accounts.values() if account.needs_renewal}
        statements = [account.statement() for account in asked]
        now = self._clock()
        try:
            async with patience(ANSWER_S):
                leases = await self._lender.renew(self._router_id, statements) if statements else ()
            for account, lease in zip(asked, leases, strict=True):
                account.leased.accept(lease, now)
            self._is_reached = True
        except Exception as error:
            if self._is_reached:
                logger.warning("limits cannot be renewed; what is held is used up: %r", error)
            self._is_reached = False
        finally:
            self._renewal = None
            for account, num_waiting in asked.items():
                account.serve(num_waiting, self._clock())
            if any(account.waiting for account in self._accounts.values()):
                self._renewing()  # for those who came meanwhile

    def _account(self, tenant: Tenant) -> Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = Account(tenant, self._clock)
        if account.tenant is not tenant:
            account.tenant, account.bounds = tenant, bounds_of(tenant.limits)
        return account


def _check_possible(need: Amounts, bounds: Mapping[Meter, int]) -> None:
    """Raise InvalidRequest where a limit is less than the request alone may come to, however little was used."""
    for meter, amount in need.items():
        if amount <= bounds[meter]:
            continue
        what = "one request" if meter in COUNTS_REQUESTS else "the prompts and all that may be generated"
        allowed, wanted = (each / NANO if meter in BUDGETS else each for each in (bounds[meter], amount))
        raise InvalidRequest(
            f"The tenant's {meter} is {allowed}, and {what} may come to {wanted}; ask for less at once.",
            None,
            {"limit": meter.value, "allowed": allowed, "wanted": wanted},
        )


NUM_ENDS, ENDS_S = 16, 10.0
"""Of requests, the last ones and not longer ago, by which it is told how fast they end."""

Clock = Callable[[], float]


Rates = Mapping[Meter, LimitState]
"""Of requests and of tokens per minute, those that are limited."""


class Permit:
    """What one request has reserved; whoever has it settles it once, or more often in vain.

    parts:   tokens of that which are for the prompt, and for all completions, of each
    is_over: is called when it is settled
    """

    def __init__(
        self,
        leased: LeasedLimits,
        reserved: Amounts,
        *,
        parts: Sequence[tuple[int, int]] = (),
        clock: Clock = time.monotonic,
        is_over: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts = parts
        self._leased = leased
        self._reserved = reserved
        self._clock = clock
        self._is_over = is_over
        self._minute_ends, self._ends = clock() + MINUTE_S, leased.ends

    def settle(self, spent: Amount) -> None:
        """Give back what was reserved and not spent. If more was spent, take it from what comes next.

        It goes to the minute, day and month in which it was reserved, and to no later one.
        """
        reserved, self._reserved = self._reserved, {}
        left, now = spent.over(reserved), self._clock()
        for meter, held in reserved.items():  # a comprehension is a call more
            left[meter] = held if meter in GAUGES else held - left[meter]
            if meter not in GAUGES and left[meter] > 0 and self._ends.get(meter, self._minute_ends) <= now:
                left[meter] = 0
        if reserved:
            self._leased.settle(reserved, left)
            self._is_over()


FREE = Permit(LeasedLimits(), {})
"""Of a tenant without limits."""


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    need: Amounts
    reserved: asyncio.Future[bool]


class Account:
    """One tenant's leased limits, and who waits for more. num_patient: of those, for what others may give back"""

    def __init__(self, tenant: Tenant, clock: Clock) -> None:
        self.tenant = tenant
        self.bounds = bounds_of(tenant.limits)
        self.leased = LeasedLimits()
        self.waiting: list[Waiting] = []
        self.num_patient = 0
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)
        self._appointments = {
            meter: Appointments(max_s=MAX_RETRY_S, clock=clock, jitter=random.random) for meter in Meter
        }

    @property
    def needs_renewal(self) -> bool:
        return bool(self.waiting) or not self.leased.is_idle

    def statement(self) -> Statement:
        """What is used, and what is wanted for those who wait."""
        wanted: Counter[Meter] = Counter()
        for each in self.waiting:
            wanted.update(each.need)
        return self.leased.statement(self.tenant.name, self.bounds, wanted, now=self._clock())

    def note_end(self) -> None:
        """A request of it is over."""
        self._ends.append(self._clock())

    def refusal(self, meter: Meter, need: Amounts) -> QuotaExceeded:
        """Return the refusal for a request that finds too little left.

        No two requests are told the same time, and none a time before there is enough, unless that is later than
        clients obey. If a day or month is used up, the refusal says when the next one begins. If running requests
        have reserved what is missing, it gives an appointment instead: they may spend less.
        """
        bound, now = self.bounds[meter], self._clock()
        wait_s, kind = self.leased.wait_s(meter, now), QuotaExceeded
        if meter in SETTLED and self.leased.is_only_reserved(meter, need[meter]):
            at = self._appointments[meter].make(pace_per_s=self._pace_per_s(1.0))
            told = f"What is left of the tenant's {meter} is reserved by requests that still run; retry in {at} s."
        elif meter in BUDGETS:
            kind, at = OutOfBudget, math.ceil(self.leased.reset_s(meter, now))
            left, most = self.leased.remaining(meter) / NANO, need[meter] / NANO
            what = f"has {left:g} left, and the request may come to {most:g}" if left else "is spent"
            told = f"The tenant's {meter} {what}; it begins anew in {at} s."
        else:
            pace_per_s = max(bound, 1) / (1 if meter in GAUGES else MINUTE_S) / max(1, need[meter])
            pace_per_s = self._pace_per_s(pace_per_s) if meter in GAUGES else pace_per_s
            appointment = self._appointments[meter].make(pace_per_s=pace_per_s, excess_s=wait_s)
            at, left = max(appointment, math.ceil(min(wait_s, OBEYED_S))), self.leased.remaining(meter)
            told = (
                f"The tenant's {meter}, {bound}, has {left} left, and the request needs {need[meter]}; retry in {at} s."
            )
        return kind(told, None, {"limit": meter.value, "retry_after_s": at})

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
                each.reserved.set_result(self.leased.take(each.need, now))
