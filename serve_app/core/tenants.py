"""Who asks: a tenant with its rights and limits, and the key that it came with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from serve_app.core.shares import Priority, Share

LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0
"""Virtual counters are what was served divided by weights: between these, sums of them lose nothing that matters."""
LEAST_BUDGET, MOST_BUDGET = 1e-9, 1e12
"""Costs are counted in billionths."""
EVERYTHING = "*"
NOTHING = "(?!)"
"""No text is like this."""


class Scope(StrEnum):
    """What a key may be used for."""

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
        """Whether the base, or the adapter on it, may be used."""
        address = base if adapter is None else f"{base}:{adapter}"
        return self.allow_everything or self._addresses.fullmatch(address) is not None

    def touch(self, base: str) -> bool:
        """Whether the base or any adapter that it could have may be used."""
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
    """A team that uses the service.

    weight:       of its share of an engine beside the others' that wait, > 0
    priority:     the class that its requests wait in
    rights:       to models
    limits:       on how much it may ask for
    max_n:        `n` and `best_of` of one request; None is the service's own bound
    max_tokens:   of one completion; None is the model's context
    cors_origins: pages of these origins may call with its keys, besides those of the service; `*` is any
    log_texts:    share of its requests of which prompts and completions are logged, from 0 to 1
    cache_group:  tenants of the same group find the prefixes that one of them had computed; None is the tenant's own
    added:        number of the event by which it was added, which no other tenant of its name has; no part of what
                  is declared
    """

    name: str
    weight: float = 1.0
    priority: Priority = "standard"
    rights: Rights = field(default_factory=Rights)
    limits: Limits = field(default_factory=Limits)
    max_n: int | None = None
    max_tokens: int | None = None
    cors_origins: tuple[str, ...] = ()
    cache_group: str | None = None
    log_texts: float = 0.0
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


LOCAL = Identity(tenant=Tenant(name="local"))
"""Everybody, where no keys are asked for."""
NOBODY = Identity(tenant=Tenant(name="nobody", rights=Rights(())), scopes=frozenset())
"""Who asks for what needs no key, where keys are asked for."""


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Any of the patterns; what a search costs grows with their lengths alone, whatever they look like."""
    ways = [":".join(map(_run_of, pattern.split(":"))) for pattern in patterns]
    return re.compile("|".join(ways) if ways else NOTHING)


def _run_of(part: str) -> str:
    """What stands between two stars is taken where it is first found, and never looked for again."""
    first, *rest = map(re.escape, part.split("*"))
    if not rest:
        return first
    return first + "".join(f"(?>[^:]*?{each})" for each in rest[:-1]) + f"[^:]*{rest[-1]}"
