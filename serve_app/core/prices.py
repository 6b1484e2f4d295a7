"""What tokens cost, by model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NANO_PER_TOKEN = 1000
"""A price of 1 per million tokens is so many billionths per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Per million tokens, in the one currency of the configuration. cached: None is the price of other prompt tokens"""

    prompt: float = 0.0
    cached: float | None = None
    completion: float = 0.0

    def cost(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """In billionths. The prompt's tokens are with those of them that were cached."""
        if self is FREE:
            return 0
        cached = self.prompt if self.cached is None else self.cached
        return (
            (prompt_tokens - cached_tokens) * round(self.prompt * NANO_PER_TOKEN)
            + cached_tokens * round(cached * NANO_PER_TOKEN)
            + completion_tokens * round(self.completion * NANO_PER_TOKEN)
        )


FREE = Price()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """by_model: of `base:adapter`, of `base` for every adapter on it that has none of its own, or of `*`"""

    by_model: Mapping[str, Price] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, base: str, adapter: str | None = None) -> Price:
        if adapter is not None and f"{base}:{adapter}" in self.by_model:
            return self.by_model[f"{base}:{adapter}"]
        return self.by_model.get(base) or self.by_model.get("*", FREE)
