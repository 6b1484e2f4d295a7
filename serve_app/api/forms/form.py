"""Forms of values: the interface of all, and numbers, booleans, words and strings with the ranges that are shared."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard

from pydantic import Field
from pydantic.fields import FieldInfo

from serve_app.api.dialects import Dialect
from serve_app.api.error_text import shown
from serve_app.api.forms.schema import BOOLEAN, STRING, Schema, array, either, nullable, record, string
from serve_app.api.limits import INT32_MAX, MAX_TOKEN_ID, WireLimits
from serve_app.core.errors import InvalidRequest

MAX_TOLD = 200
"""Names of what was ignored in one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What configuration and dialect allow together: a dialect widens the log-probabilities and narrows all else."""

    limits: WireLimits
    dialect: Dialect

    @property
    def max_n(self) -> int:
        return min(self.limits.max_n, self.dialect.max_n)

    @property
    def max_logprobs(self) -> int:
        return max(self.limits.max_logprobs, self.dialect.max_logprobs)

    @property
    def max_stop_strings(self) -> int:
        return min(self.limits.max_stop_strings, self.dialect.max_stop_strings or self.limits.max_stop_strings)


Number = int | float
Bound = Number | Callable[[Terms], Number]
"""One end of a range: fixed, or what the terms say."""


def bound_in(bound: Bound, terms: Terms) -> Number:
    return bound(terms) if callable(bound) else bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A parameter's value as it was sent; `name` is as the client spelled it.

    ignored: takes the names of what in it is not carried out, for the client to be told
    """

    name: str
    sent: object
    terms: Terms
    ignored: list[str] = field(default_factory=list)

    def ignore(self, part: str) -> None:
        """Have the client told once that this part of the value is not carried out."""
        path = f"{self.name}.{part}"
        if path not in self.ignored and len(self.ignored) < MAX_TOLD:
            self.ignored.append(path)

    def refused(self, allowed: str) -> InvalidRequest:
        return InvalidRequest.refusing(self.name, must=f"be {allowed}", found=shown(self.sent))

    def part(self, at: int | str, sent: object) -> Value:
        """Return an element or a member, under a name of its own."""
        return replace(self, name=f"{self.name}[{at if isinstance(at, int) else shown(at)}]", sent=sent)

    def part_refused(self, at: int | str, allowed: str, found: object) -> InvalidRequest:
        return self.part(at, found).refused(allowed)

    def elements(self, max_length: int, allowed: str, *, is_needed: bool = False) -> list[object]:
        """Return the list that was sent. Raises InvalidRequest for anything else, or if it is too long.

        is_needed: whether it must have an element
        """
        if not isinstance(self.sent, list) or (is_needed and not self.sent):
            raise self.refused(allowed)
        if len(self.sent) > max_length:
            raise InvalidRequest.refusing(self.name, must=f"be {allowed}", found=f"{len(self.sent)} elements")
        return self.sent


def check_amount(found: int, most: int, path: str, *, must: str) -> None:
    """Raise InvalidRequest if there are more. must: with {} for the number, as in `hold at most {} images`"""
    if found > most:
        raise InvalidRequest.refusing(path, must=must.format(most), found=str(found))


class Form(Protocol):
    """One form that values have. Null is no value and never gets here."""

    def words(self, terms: Terms) -> str:
        """Return what a value must be, to stand behind "must be"."""

    def schema(self, terms: Terms) -> Schema:
        """Return the JSON schema of the values that it takes."""

    def read(self, value: Value) -> object:
        """Return the value as `CompletionRequest` holds it. Raises InvalidRequest that says `words`."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The one declaration of a parameter, beside the default of the field that holds it.

    about: one sentence for whoever reads the documentation
    name:  on the wire, where that is not the field's
    """

    form: Form
    about: str
    name: str | None = None


def parameter(default: Any, form: Form, about: str, name: str | None = None) -> Any:
    """Return a model's field that holds a parameter; `...` as its default requires it."""
    field_info: FieldInfo = Field(default)
    field_info.metadata.append(Parameter(form, about, name))
    return field_info


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
    read_as: Mapping[int, int | None] = field(default_factory=dict)

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
        """Return whether it is an integer of the range."""
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
        return either(self.count.schema(terms), BOOLEAN)

    def read(self, value: Value) -> int | None:
        if isinstance(value.sent, bool):
            return 1 if value.sent else None
        sent = integral(value.sent)
        if not self.count.holds(sent, value.terms):
            raise value.refused(self.words(value.terms))
        return sent


TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}


def is_token_id(value: object) -> TypeGuard[int]:
    """Return whether some vocabulary could have this id."""
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def integral(value: object) -> object:
    """Return a whole number as an integer, as JSON has one kind of number."""
    return int(value) if isinstance(value, float) and math.isfinite(value) and value.is_integer() else value


class Boolean:
    """True or false, and nothing that looks like it."""

    def words(self, terms: Terms) -> str:
        return "a boolean"

    def schema(self, terms: Terms) -> Schema:
        return BOOLEAN

    def read(self, value: Value) -> bool:
        if not isinstance(value.sent, bool):
            raise value.refused(self.words(value.terms))
        return value.sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A string of so many characters; without `max_chars` of any number. kind: how messages call it"""

    min_chars: int = 0
    max_chars: Callable[[Terms], int] | None = None
    kind: str = ""

    def words(self, terms: Terms) -> str:
        kind = self.kind or ("a non-empty string" if self.min_chars else "a string")
        return kind if self.max_chars is None else f"{kind} of at most {self.max_chars(terms)} characters"

    def schema(self, terms: Terms) -> Schema:
        return string(least=self.min_chars, most=None if self.max_chars is None else self.max_chars(terms))

    def read(self, value: Value) -> str:
        if not (isinstance(value.sent, str) and self._holds(len(value.sent), value.terms)):
            raise value.refused(self.words(value.terms))
        return value.sent

    def _holds(self, num_chars: int, terms: Terms) -> bool:
        return num_chars >= self.min_chars and (self.max_chars is None or num_chars <= self.max_chars(terms))


@dataclass(frozen=True, slots=True)
class FlagOr:
    """A boolean or one word."""

    word: str

    def words(self, terms: Terms) -> str:
        return f'a boolean or "{self.word}"'

    def schema(self, terms: Terms) -> Schema:
        return either(BOOLEAN, {"const": self.word})

    def read(self, value: Value) -> bool | str:
        if not (isinstance(value.sent, bool) or (isinstance(value.sent, str) and value.sent == self.word)):
            raise value.refused(self.words(value.terms))
        return value.sent


class OneOf:
    """One of a few strings; `read_as` makes of it what the request holds."""

    __slots__ = ("_options", "_read_as")

    def __init__(self, *options: str, read_as: Callable[[str], Any] = str) -> None:
        self._options = options
        self._read_as = read_as

    def words(self, terms: Terms) -> str:
        return " or ".join(f'"{option}"' for option in self._options)

    def schema(self, terms: Terms) -> Schema:
        return {"enum": list(self._options)}

    def read(self, value: Value) -> Any:
        if not (isinstance(value.sent, str) and value.sent in self._options):
            raise value.refused(self.words(value.terms))
        return self._read_as(value.sent)


@dataclass(frozen=True, slots=True)
class Members:
    """An object of booleans; who reads it further knows what is done with each."""

    names: tuple[str, ...]

    def words(self, terms: Terms) -> str:
        return "an object with the booleans " + " and ".join(f'"{name}"' for name in self.names)

    def schema(self, terms: Terms) -> Schema:
        return record(optional=dict.fromkeys(self.names, nullable(BOOLEAN)))

    def read(self, value: Value) -> dict[str, object]:
        if not isinstance(value.sent, dict):
            raise value.refused(self.words(value.terms))
        return value.sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Strings:
    """One string or a list of them; empty ones and those that stand before are left out."""

    max_strings: Callable[[Terms], int]
    one: str = "a string"
    several: str = "strings"

    def words(self, terms: Terms) -> str:
        return (
            f"{self.one} or a list of at most {self.max_strings(terms)} {self.several},"
            f" each of at most {terms.limits.max_stop_chars} characters"
        )

    def schema(self, terms: Terms) -> Schema:
        one = string(most=terms.limits.max_stop_chars)
        return either(one, array(one, most=self.max_strings(terms)))

    def read(self, value: Value) -> tuple[str, ...]:
        if isinstance(value.sent, str):
            strings = [_checked(value.sent, value.name, value.terms)]
        else:
            elements = value.elements(self.max_strings(value.terms), self.words(value.terms))
            strings = _all_checked(elements, value)
        return tuple(dict.fromkeys(string for string in strings if string))


class Paths:
    """A list of strings, each the path of a field; an empty one is a field that nothing has."""

    def words(self, terms: Terms) -> str:
        return f"a list of at most {terms.limits.max_stop_strings} strings"

    def schema(self, terms: Terms) -> Schema:
        return array(STRING, most=terms.limits.max_stop_strings)

    def read(self, value: Value) -> tuple[str, ...]:
        elements = value.elements(value.terms.limits.max_stop_strings, self.words(value.terms))
        return tuple(_all_checked(elements, value))


class Breakers:
    """A list of strings, none of them empty, or JSON of it in a string, as some front ends write it."""

    def words(self, terms: Terms) -> str:
        limits = terms.limits
        return (
            f"a list of 1 to {limits.max_stop_strings} non-empty strings, each of at most"
            f" {limits.max_stop_chars} characters, or JSON of it in a string"
        )

    def schema(self, terms: Terms) -> Schema:
        one = string(least=1, most=terms.limits.max_stop_chars)
        return array(one, least=1, most=terms.limits.max_stop_strings)

    def read(self, value: Value) -> tuple[str, ...]:
        words = self.words(value.terms)
        if isinstance(value.sent, str):
            with suppress(ValueError, RecursionError):
                value = replace(value, sent=json.loads(value.sent))
        elements = value.elements(value.terms.limits.max_stop_strings, words, is_needed=True)
        if "" in elements:
            raise value.refused(words)
        return tuple(dict.fromkeys(_all_checked(elements, value)))


def _all_checked(elements: list[object], value: Value) -> list[str]:
    return [_checked(string, f"{value.name}[{at}]", value.terms) for at, string in enumerate(elements)]


def _checked(string: object, path: str, terms: Terms) -> str:
    if not isinstance(string, str):
        raise InvalidRequest.refusing(path, must="be a string", found=shown(string))
    check_amount(len(string), terms.limits.max_stop_chars, path, must="be at most {} characters")
    return string


MAX_PROBABILITIES = 1024
"""Of `n_probs`, which llama.cpp does not bound; a whole vocabulary for every token would be no answer."""


def _unlimited(terms: Terms) -> str:
    return "; -1 is no limit but the model's context" if terms.dialect.takes_unlimited_tokens else ""


FLAG = Boolean()
COUNT = Integer(low=0)
WINDOW = Integer(low=-1, besides="; -1 is the whole context")
COMPLETIONS = Integer(low=1, high=lambda terms: terms.max_n)
FRACTION = Real(low=0, high=1)
SHARE = Real(above=0, high=1)
PENALTY = Real(low=-2, high=2)
STRENGTH = Real(low=0, high=100)
RATE = Real(above=0, high=100)
CANDIDATES = Integer(low=0, high=lambda terms: terms.max_logprobs)
PROBABILITIES = Integer(low=0, high=lambda terms: max(MAX_PROBABILITIES, terms.max_logprobs))
STOPS = Strings(max_strings=lambda terms: terms.max_stop_strings)
WORDS = Strings(max_strings=lambda terms: terms.limits.max_stop_strings)
PATTERNS = Strings(
    max_strings=lambda terms: terms.limits.max_stop_strings, one="a regular expression", several="of them"
)
LENGTH = Integer(low=lambda terms: terms.dialect.least_max_tokens, besides=_unlimited)
