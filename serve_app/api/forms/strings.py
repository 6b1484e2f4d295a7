"""Strings that end a completion, patterns that do, and strings that break runs of repetition."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from serve_app.api.forms.form import Schema, Terms, Value
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest


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
        one = {"type": "string", "maxLength": terms.limits.max_stop_chars}
        return {"anyOf": [one, {"type": "array", "items": one, "maxItems": self.max_strings(terms)}]}

    def read(self, value: Value) -> tuple[str, ...]:
        if isinstance(value.sent, str):
            strings = [_checked(value.sent, value.name, value.terms)]
        else:
            elements = value.elements(self.max_strings(value.terms), self.words(value.terms))
            strings = _all_checked(elements, value)
        return tuple(dict.fromkeys(string for string in strings if string))


@dataclass(frozen=True, slots=True)
class Paths:
    """A list of strings, each the path of a field; an empty one is a field that nothing has."""

    def words(self, terms: Terms) -> str:
        return f"a list of at most {terms.limits.max_stop_strings} strings"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "array", "items": {"type": "string"}, "maxItems": terms.limits.max_stop_strings}

    def read(self, value: Value) -> tuple[str, ...]:
        elements = value.elements(value.terms.limits.max_stop_strings, self.words(value.terms))
        return tuple(_all_checked(elements, value))


@dataclass(frozen=True, slots=True)
class Breakers:
    """A list of strings, none of them empty, or JSON of it in a string, as some front ends write it."""

    def words(self, terms: Terms) -> str:
        limits = terms.limits
        return (
            f"a list of 1 to {limits.max_stop_strings} non-empty strings, each of at most"
            f" {limits.max_stop_chars} characters, or JSON of it in a string"
        )

    def schema(self, terms: Terms) -> Schema:
        one = {"type": "string", "minLength": 1, "maxLength": terms.limits.max_stop_chars}
        return {"type": "array", "items": one, "minItems": 1, "maxItems": terms.limits.max_stop_strings}

    def read(self, value: Value) -> tuple[str, ...]:
        words = self.words(value.terms)
        if isinstance(value.sent, str):
            with suppress(ValueError, RecursionError):
                value = replace(value, sent=json.loads(value.sent))
        elements = value.elements(value.terms.limits.max_stop_strings, words)
        if not elements or "" in elements:
            raise value.refused(words)
        return tuple(dict.fromkeys(_all_checked(elements, value)))


def _all_checked(elements: list[object], value: Value) -> list[str]:
    return [_checked(string, f"{value.name}[{at}]", value.terms) for at, string in enumerate(elements)]


def _checked(string: object, path: str, terms: Terms) -> str:
    if not isinstance(string, str):
        raise InvalidRequest.refusing(path, must="be a string", found=shown(string))
    most = terms.limits.max_stop_chars
    if len(string) > most:
        raise InvalidRequest.refusing(path, must=f"be at most {most} characters", found=str(len(string)))
    return string
