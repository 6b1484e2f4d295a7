"""Who asks: a tenant with its rights and limits, and the key that it came with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

EVERYTHING = "*"


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
class Tenant:
    """A team that uses the service.

    rights:      to models
    max_n:       `n` and `best_of` of one request; None is the service's own bound
    cache_group: tenants of the same group find the prefixes that one of them had computed; None is the tenant's own
    """

    name: str
    rights: Rights = field(default_factory=Rights)
    max_n: int | None = None
    cache_group: str | None = None


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
    """Any of the patterns; their number is what a search costs, not what they look like."""
    return re.compile("|".join(re.escape(pattern).replace(r"\*", "[^:]*") for pattern in patterns))
