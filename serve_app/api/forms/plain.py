"""Values with a single form and no range: strings, booleans, one of a few words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_app.api.forms.form import Schema, Terms, Value


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false, and nothing that looks like it."""

    def words(self, terms: Terms) -> str:
        return "a boolean"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "boolean"}

    def read(self, value: Value) -> bool:
        if not isinstance(value.sent, bool):
            raise value.refused(self.words(value.terms))
        return value.sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A string of so many characters; without `max_chars` of any number."""

    min_chars: int = 0
    max_chars: Callable[[Terms], int] | None = None

    def words(self, terms: Terms) -> str:
        kind = "a non-empty string" if self.min_chars else "a string"
        return kind if self.max_chars is None else f"{kind} of at most {self.max_chars(terms)} characters"

    def schema(self, terms: Terms) -> Schema:
        schema: Schema = {"type": "string"}
        if self.min_chars:
            schema["minLength"] = self.min_chars
        if self.max_chars is not None:
            schema["maxLength"] = self.max_chars(terms)
        return schema

    def read(self, value: Value) -> str:
        if not (isinstance(value.sent, str) and self._holds(len(value.sent), value.terms)):
            raise value.refused(self.words(value.terms))
        return value.sent

    def _holds(self, num_chars: int, terms: Terms) -> bool:
        return num_chars >= self.min_chars and (self.max_chars is None or num_chars <= self.max_chars(terms))


class FlagOr:
    """A boolean or one word."""

    __slots__ = ("_word",)

    def __init__(self, word: str) -> None:
        self._word = word

    def words(self, terms: Terms) -> str:
        return f'a boolean or "{self._word}"'

    def schema(self, terms: Terms) -> Schema:
        return {"anyOf": [{"type": "boolean"}, {"const": self._word}]}

    def read(self, value: Value) -> bool | str:
        if isinstance(value.sent, bool):
            return value.sent
        if not (isinstance(value.sent, str) and value.sent == self._word):
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
        boolean = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
        return {"type": "object", "properties": dict.fromkeys(self.names, boolean)}

    def read(self, value: Value) -> dict[str, object]:
        if not isinstance(value.sent, dict):
            raise value.refused(self.words(value.terms))
        return value.sent
