"""Says in words what a parameter's value must be, with the bounds of configuration and dialect in their places."""

from __future__ import annotations

from dataclasses import replace

from serve_app.api.dialects.dialect import Dialect
from serve_app.api.limits import WireLimits
from serve_app.api.parameters import Accepted, Carried
from serve_app.api.values import SAMPLERS


def limits_within(limits: WireLimits, dialect: Dialect) -> WireLimits:
    """The configured limits, where the dialect widens them."""
    return replace(limits, max_logprobs=max(limits.max_logprobs, dialect.max_logprobs))


def max_stop_strings(limits: WireLimits, dialect: Dialect) -> int:
    return min(limits.max_stop_strings, dialect.max_stop_strings or limits.max_stop_strings)


def in_words(disposition: Carried | Accepted, limits: WireLimits, dialect: Dialect) -> str:
    return disposition.allowed.format(
        limits=limits_within(limits, dialect),
        dialect=dialect,
        samplers=", ".join(SAMPLERS),
        max_stop_strings=max_stop_strings(limits, dialect),
    )
