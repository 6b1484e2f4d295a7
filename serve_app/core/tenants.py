"""Tenants with their rights and limits, the meters of what they use, and the leases by which routers hold some."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache

from serve_app.core.shares import Priority, Share

LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0
"""Virtual counters are what was served divided by weights: between these, sums of them lose nothing that matters."""
LEAST_BUDGET, MOST_BUDGET = 1e-9, 1e12
"""Costs are counted in billionths."""
EVERYTHING = "*"
NOTHING = "(?!)"
"""A pattern that matches no text."""
NANO = 1_000_000_000
"""Costs are whole billionths of the currency, so that sums are exact."""


class Scope(StrEnum):
    """What a key permits."""

    INFER = "infer"
    ADAPTERS_WRITE = "adapters:write"
    METRICS = "metrics"
    ADMIN = "admin"


@dataclass(frozen=True)
class Rights:
    """Which models may be used, by patterns over addresses: `base`, `base:adapter`, `*` for any run of characters.

    A pattern without a colon is of bases alone; `*` alone is of everything. Neither part of a pattern reaches over the
    colon, so `demo*` is `demo-2` but not `demo:pirate`.
    """

    patterns: tuple[str, ...] = (EVERYTHING,)

    def allow(self, base: str, adapter: str | None = None) -> bool:
        """Return whether the tenant may use the base, or the adapter on it."""
        address = base if adapter is None else f"{base}:{adapter}"
        return self.allow_everything or self._addresses.fullmatch(address) is not None

    def touch(self, base: str) -> bool:
        """Return whether the tenant may use the base or any adapter that it could have."""
        return self.allow_everything or self._bases.fullmatch(base) is not None

    @cached_property
    def allow_everything(self) -> bool:
        return EVERYTHING in self.patterns

    @cached_property
    def _addresses(self) -> re.Pattern[str]:
        return _any_of(self.patterns)

    @cached_property
    def _bases(self) -> re.Pattern[str]:
        return _any_of(pattern.partition(":")[0] for pattern in self.patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may be asked for; None is no bound.

    requests_per_minute, tokens_per_minute: tokens are those of prompts and of completions
    max_in_flight, max_in_flight_tokens:    at one moment
    budget_per_day, budget_per_month:       what may be spent from midnight and from the first of the month, UTC, in
                                            the currency of the prices; what has no price costs nothing
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_in_flight: int | None = None
    max_in_flight_tokens: int | None = None
    budget_per_day: float | None = None
    budget_per_month: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A team that uses the service, with its own rights and limits.

    weight:       of its share of an engine beside the others' that wait, > 0
    priority:     the class that its requests wait in
    rights:       to models
    publishes:    names under which it may publish adapters, with a key for `adapters:write`
    limits:       on how much it may ask for
    max_n:        `n` and `best_of` of one request; None is the service's own bound
    max_tokens:   of one completion; None is the model's context
    cors_origins: pages of these origins may call with its keys, besides those of the service; `*` is any
    log_texts:    share of its requests of which prompts and completions are logged, from 0 to 1
    resumes:      whether its streams are kept for a while, so that clients that lost them can fetch the rest
    cache_group:  tenants of the same group find the prefixes that one of them had computed; None is the tenant's own
    added:        number of the event by which it was added, which no other tenant of its name has; no part of what
                  is declared
    """

    name: str
    weight: float = 1.0
    priority: Priority = "standard"
    rights: Rights = field(default_factory=Rights)
    publishes: Rights = Rights(())
    limits: Limits = field(default_factory=Limits)
    max_n: int | None = None
    max_tokens: int | None = None
    cors_origins: tuple[str, ...] = ()
    cache_group: str | None = None
    log_texts: float = 0.0
    resumes: bool = True
    added: int = 0

    @property
    def share(self) -> Share:
        """What its requests are computed from."""
        return Share(flow=self.name, weight=self.weight, priority=self.priority)

    @property
    def own(self) -> str:
        """What is kept for it alone is found under this, and not by another that is later added under its name."""
        return f"{self.name}#{self.added}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a request is from.

    key_id: names its key without telling it; "" where none was asked for
    """

    tenant: Tenant
    key_id: str = ""
    scopes: frozenset[Scope] = frozenset(Scope)


LOCAL = Identity(tenant=Tenant(name="local", publishes=Rights()))
"""Every client, if the service asks for no keys."""
NOBODY = Identity(tenant=Tenant(name="nobody", rights=Rights(())), scopes=frozenset())
"""A client without a key, on routes that need none, if the service asks for keys."""


class Meter(StrEnum):
    """One limit of a tenant, by the name that it is configured with."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    IN_FLIGHT = "max_in_flight"
    IN_FLIGHT_TOKENS = "max_in_flight_tokens"
    DAY = "budget_per_day"
    MONTH = "budget_per_month"


GAUGES = frozenset({Meter.IN_FLIGHT, Meter.IN_FLIGHT_TOKENS})
"""Of which a request frees what it used as soon as it ends."""
BUDGETS = frozenset({Meter.DAY, Meter.MONTH})
RATES = frozenset({Meter.REQUESTS, Meter.TOKENS})
"""Limits on use within any minute."""
SETTLED = BUDGETS | {Meter.TOKENS}
"""Meters on which a request may spend less than it has reserved."""
COUNTS_TOKENS = frozenset({Meter.TOKENS, Meter.IN_FLIGHT_TOKENS})
COUNTS_REQUESTS = frozenset({Meter.REQUESTS, Meter.IN_FLIGHT})

Amounts = dict[Meter, int]
"""By meter; of meters without a limit nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What a request uses, or may use at most. cost: in billionths of the currency"""

    requests: int = 0
    tokens: int = 0
    cost: int = 0

    def over(self, meters: Iterable[Meter]) -> Amounts:
        """Return how much the request counts on each of these meters."""
        tokens, cost, requests = self.tokens, self.cost, self.requests
        return {meter: cost if meter in BUDGETS else tokens if meter in COUNTS_TOKENS else requests for meter in meters}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a router says of a tenant when it renews its lease. Told twice, it changes nothing the second time.

    used:   all that the router ever took of what it was granted, less refunds; of gauges what is in use now
    wanted: what it wants to hold beyond that
    spare:  the part of `wanted` that no request waits for
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
    left:    what no router holds
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


@lru_cache(maxsize=4096)
def bounds_of(limits: Limits) -> Mapping[Meter, int]:
    """Return the limits that are set, as whole tokens, requests and billionths of the currency. Do not change the
    result.
    """
    bounds = {}
    for meter in Meter:
        limit = getattr(limits, meter.value)
        if limit is not None:
            bounds[meter] = round(limit * NANO) if meter in BUDGETS else int(limit)
    return bounds


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of these; a search takes time linear in their lengths, whatever they look like."""
    ways = [":".join(map(_run_of, pattern.split(":"))) for pattern in patterns]
    return re.compile("|".join(ways) if ways else NOTHING)


def _run_of(part: str) -> str:
    """Return the expression of one part; text between two stars matches its first occurrence, without backtracking."""
    first, *rest = map(re.escape, part.split("*"))
    if not rest:
        return first
    return first + "".join(f"(?>[^:]*?{each})" for each in rest[:-1]) + f"[^:]*{rest[-1]}"
