"""The bounds that configuration and dialect set together, for the parser, the messages and the description alike."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.api.dialects.dialect import Dialect
from serve_app.api.limits import WireLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The highest value of a parameter; of `model` the length, of `stop` the number of strings."""

    model: int
    n: int
    best_of: int
    top_k: int
    stop: int
    logprobs: int
    top_logprobs: int

    def of(self, name: str) -> int | None:
        """Of the parameter of this name; None where neither configuration nor dialect bounds it."""
        bound: int | None = getattr(self, name, None) if name in Bounds.__slots__ else None
        return bound


def bounds_of(limits: WireLimits, dialect: Dialect) -> Bounds:
    """A dialect may widen the number of log-probabilities and narrow everything else."""
    num_logprobs = max(limits.max_logprobs, dialect.max_logprobs)
    max_n = min(limits.max_n, dialect.max_n)
    return Bounds(
        model=limits.max_model_chars,
        n=max_n,
        best_of=max_n,
        top_k=dialect.max_top_k,
        stop=min(limits.max_stop_strings, dialect.max_stop_strings or limits.max_stop_strings),
        logprobs=num_logprobs,
        top_logprobs=num_logprobs,
    )
