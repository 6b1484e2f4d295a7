"""Numbers within a range; the range is stated once and worded from there."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeGuard

from serve_app.api.forms.form import Bound, Number, Schema, Terms, Value, bound_in
from serve_app.api.limits import INT32_MAX, MAX_TOKEN_ID

LOWEST = -sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer:
    """A whole number, however it is written.

    besides: said behind the range, where some numbers mean something of their own
    read_as: what some of them are read as
    """

    low: Bound
    high: Bound = INT32_MAX
    besides: str | Callable[[Terms], str] = ""
    read_as: Mapping[int, int | None] = field(default_factory=lambda: MappingProxyType({}))

    def words(self, terms: Terms) -> str:
        besides = self.besides(terms) if callable(self.besides) else self.besides
        return f"an integer from {bound_in(self.low, terms)} to {bound_in(self.high, terms)}{besides}"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "integer", "minimum": bound_in(self.low, terms), "maximum": bound_in(self.high, terms)}

    def read(self, value: Value) -> int | None:
        sent = integral(value.sent)
        if not self.holds(sent, value.terms):
            raise value.refused(self.words(value.terms))
        return self.read_as.get(sent, sent)

    def holds(self, number: object, terms: Terms) -> TypeGuard[int]:
        """Whether it is an integer of the range."""
        return type(number) is int and bound_in(self.low, terms) <= number <= bound_in(self.high, terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """A finite number.

    low, above: the least that is taken, or what every value is above; neither is no such bound
    """

    low: Number | None = None
    above: Number | None = None
    high: Bound
    besides: str = ""

    def words(self, terms: Terms) -> str:
        high = bound_in(self.high, terms)
        if self.above is not None:
            return f"a number above {self.above} and at most {high}{self.besides}"
        return f"a number {'of at most' if self.low is None else f'from {self.low} to'} {high}{self.besides}"

    def schema(self, terms: Terms) -> Schema:
        ends = {"minimum": self.low, "exclusiveMinimum": self.above, "maximum": bound_in(self.high, terms)}
        return {"type": "number", **{name: end for name, end in ends.items() if end is not None}}

    def read(self, value: Value) -> float:
        sent = value.sent
        if isinstance(sent, bool) or not isinstance(sent, int | float) or not self._holds(sent, value.terms):
            raise value.refused(self.words(value.terms))
        return float(sent)

    def _holds(self, number: Number, terms: Terms) -> bool:
        if self.above is not None and not number > self.above:
            return False
        return (LOWEST if self.low is None else self.low) <= number <= bound_in(self.high, terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountOrFlag:
    """A count; true is one, or what another parameter says, and false is no count at all."""

    count: Integer

    def words(self, terms: Terms) -> str:
        return f"{self.count.words(terms)}, or a boolean"

    def schema(self, terms: Terms) -> Schema:
        return {"anyOf": [self.count.schema(terms), {"type": "boolean"}]}

    def read(self, value: Value) -> int | None:
        if isinstance(value.sent, bool):
            return 1 if value.sent else None
        sent = integral(value.sent)
        if not self.count.holds(sent, value.terms):
            raise value.refused(self.words(value.terms))
        return sent


TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}


def is_token_id(value: object) -> TypeGuard[int]:
    """Whether some vocabulary could have it."""
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def integral(value: object) -> object:
    """JSON has one kind of number: a whole one is an integer, however it is written."""
    return int(value) if isinstance(value, float) and math.isfinite(value) and value.is_integer() else value
