"""What a tenant may use: amounts, the meters that bound them, and the leases by which routers hold some of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

from serve_app.core.tenants import Limits

NANO = 1_000_000_000
"""Costs are whole billionths of the currency, so that sums are exact."""


class Meter(StrEnum):
    """One limit of a tenant, by the name that it is configured with."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    IN_FLIGHT = "max_in_flight"
    IN_FLIGHT_TOKENS = "max_in_flight_tokens"
    DAY = "budget_per_day"
    MONTH = "budget_per_month"

    @property
    def is_gauge(self) -> bool:
        """Whether what was used is free again as soon as its request is over."""
        return self in GAUGES

    @property
    def is_budget(self) -> bool:
        return self in BUDGETS


GAUGES = frozenset({Meter.IN_FLIGHT, Meter.IN_FLIGHT_TOKENS})
BUDGETS = frozenset({Meter.DAY, Meter.MONTH})
RATES = frozenset({Meter.REQUESTS, Meter.TOKENS})
"""Of what is used within any minute."""
SETTLED = BUDGETS | {Meter.TOKENS}
"""Of which a request may come to spend less than it has reserved."""
COUNTS_TOKENS = frozenset({Meter.TOKENS, Meter.IN_FLIGHT_TOKENS})
COUNTS_REQUESTS = frozenset({Meter.REQUESTS, Meter.IN_FLIGHT})

Amounts = dict[Meter, int]
"""By meter; of meters without a limit nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What a request uses, or may come to. cost: in billionths of the currency"""

    requests: int = 0
    tokens: int = 0
    cost: int = 0

    def over(self, meters: Iterable[Meter]) -> Amounts:
        """How far it moves each of them."""
        tokens, cost, requests = self.tokens, self.cost, self.requests
        return {meter: cost if meter in BUDGETS else tokens if meter in COUNTS_TOKENS else requests for meter in meters}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a router says of a tenant when it renews its lease. Told twice, it changes nothing the second time.

    used:   all that the router ever took of what it was granted, less refunds; of gauges what is in use now
    wanted: what it wants to hold beyond that
    spare:  of that, what nobody waits for
    recent: of limits per minute, what of `used` it took within the last minute
    reserved: of `used`, what is reserved by requests that still run, which may come to less
    """

    tenant: str
    used: Mapping[Meter, int]
    wanted: Mapping[Meter, int]
    recent: Mapping[Meter, int] = field(default_factory=dict)
    reserved: Mapping[Meter, int] = field(default_factory=dict)
    spare: Mapping[Meter, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What a router may use of a tenant's limits.

    granted: in all, so that what it holds is this less what it used
    left:    what nobody holds
    waits:   seconds until what was wanted and is missing should be there
    resets:  seconds until the whole limit should be there, if nothing more is used
    pending: what other routers hold or have reserved, which may be there again before that
    lasts_s: from when it was asked for
    num_routers: that share what may be held without being needed yet
    """

    granted: Mapping[Meter, int]
    left: Mapping[Meter, int]
    waits: Mapping[Meter, float]
    resets: Mapping[Meter, float]
    lasts_s: float
    num_routers: int = 1
    pending: Mapping[Meter, int] = field(default_factory=dict)


class Lender(Protocol):
    """The one that hands out leases; deployments carry this call over Ray."""

    async def renew(self, router_id: str, statements: Sequence[Statement]) -> Sequence[Lease]:
        """A lease for each statement."""
        ...


@lru_cache(maxsize=4096)
def bounds_of(limits: Limits) -> Mapping[Meter, int]:
    """The limits that there are, whole: tokens, requests, billionths of the currency. Not to be changed."""
    bounds = {}
    for meter in Meter:
        limit = getattr(limits, meter.value)
        if limit is not None:
            bounds[meter] = round(limit * NANO) if meter.is_budget else int(limit)
    return bounds
