"""Reads what stands before and behind the arguments of a call, as far as it has come."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from serve_app.tools.json_scan import WHITESPACE, JsonScanner
from serve_app.tools.marks import skip_space

ARGUMENTS = ("arguments", "parameters")
BESIDES = ("id", "type")
"""Members of a call that say nothing of it."""

MAX_NAME_CHARS = 256
_NAME = re.compile(r"[ \t\r\n]*([A-Za-z0-9_.:/\-]+)(?:\[CALL_ID\][A-Za-z0-9_\-]*)?(?:\[ARGS\])?[ \t\r\n]*(?=\{)")
_NAME_BEGINNING = re.compile(r"[ \t\r\n]*[A-Za-z0-9_.:/\-]*(?:\[[A-Z_]*\]?[A-Za-z0-9_\-]*){0,2}[ \t\r\n]*")


class Incomplete(Exception):
    """The text ends before it can be told."""


class NoCall(Exception):
    """What is there is no call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A call up to its arguments.

    at:        of the arguments' first character, or behind what was read where they were whole
    arguments: that came before all else was known, or as a string; None: they begin at `at`
    is_named:  the name stands outside of JSON, so that nothing of the call follows its arguments
    """

    name: str
    at: int
    arguments: str | None = None
    is_named: bool = False


def read_named_head(text: str, at: int, names: Collection[str]) -> Head:
    """Of `name[ARGS]{…}`. Raises Incomplete, NoCall."""
    found = _NAME.match(text, at)
    if found is None:
        beginning = _NAME_BEGINNING.match(text, at)
        assert beginning is not None
        if beginning.end() < len(text) or len(text) - at > MAX_NAME_CHARS:
            raise NoCall
        raise Incomplete
    if found.group(1) not in names:
        raise NoCall
    return Head(name=found.group(1), at=found.end(), is_named=True)


def read_object_head(text: str, at: int, names: Collection[str]) -> Head:
    """Of `{"name": …, "arguments": {…}}`, whose members may come in any order; `at` is at the brace.

    Raises Incomplete, NoCall: also for a name that is none of these.
    """
    members = _Members(text, at, names)
    while members.has_more():
        key = members.key()
        if key in ARGUMENTS and members.name is not None and members.peek() == "{":
            return Head(name=members.name, at=members.at)
        members.value(key)
    if members.name is None or members.arguments is None:
        raise NoCall
    return Head(name=members.name, at=members.at, arguments=members.arguments)


def read_object_rest(text: str, at: int) -> int:
    """The place behind the object whose arguments ended before `at`. Raises Incomplete, NoCall."""
    members = _Members(text, at, (), is_inside=True)
    while members.has_more():
        key = members.key()
        if key not in BESIDES:
            raise NoCall
        members.value(key)
    return members.at


class _Members:
    """Walks the members of one object that may not be whole.

    is_inside: the walk begins behind a value
    """

    def __init__(self, text: str, at: int, names: Collection[str], *, is_inside: bool = False) -> None:
        self.at = at if is_inside else at + 1
        self.name: str | None = None
        self.arguments: str | None = None
        self._text = text
        self._names = names
        self._is_first = not is_inside
        self._seen: set[str] = set()

    def peek(self) -> str:
        """The next character that is no white space."""
        self.at = skip_space(self._text, self.at)
        if self.at == len(self._text):
            raise Incomplete
        return self._text[self.at]

    def has_more(self) -> bool:
        """Step over what stands between two members; False behind the last."""
        character = self.peek()
        if character == "}":
            self.at += 1
            return False
        if not self._is_first:
            self._expect(",")
        self._is_first = False
        return True

    def key(self) -> str:
        if self.peek() != '"':
            raise NoCall
        key = self._scanned()
        self._expect(":")
        kind = "arguments" if key in ARGUMENTS else key
        if kind in self._seen:
            raise NoCall
        self._seen.add(kind)
        self.peek()
        return str(key)

    def value(self, key: str) -> None:
        """Take the value of a member."""
        value_at = self.at
        value = self._scanned()
        if key == "name":
            if not isinstance(value, str) or value not in self._names:
                raise NoCall
            self.name = value
        elif key in ARGUMENTS:
            self.arguments = _as_object(value, self._text[value_at : self.at])
        elif key not in BESIDES:
            raise NoCall

    def _scanned(self) -> Any:
        scanner = JsonScanner()
        start, self.at = self.at, scanner.feed(self._text, self.at)
        if scanner.state == "open":
            raise Incomplete
        if scanner.state == "broken":
            raise NoCall
        return json.loads(self._text[start : self.at])

    def _expect(self, character: Literal[",", ":"]) -> None:
        if self.peek() != character:
            raise NoCall
        self.at += 1


def _as_object(value: Any, written: str) -> str:
    """Arguments as JSON of an object; some models write them into a string, or null for none."""
    if isinstance(value, dict):
        return written
    if value is None:
        return "{}"
    if isinstance(value, str):
        scanner = JsonScanner()
        end = scanner.feed(value)
        if scanner.state == "complete" and value.lstrip().startswith("{") and not value[end:].strip(WHITESPACE):
            return value.strip(WHITESPACE)
    raise NoCall
