"""Reads the part of Python's syntax of regular expressions that can be matched in one pass over a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

MAX_NESTING = 50
MAX_REPEAT = 1000
MAX_CASED = 25_000

ANCHORS = {"^": "start", "$": "end", "\\A": "first", "\\Z": "last", "\\b": "word", "\\B": "no-word"}
FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "a": re.ASCII}
ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfva]|[^\w])", re.DOTALL)
SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
COUNTS = re.compile(r"[*+?]|\{(?=\d|,\d)(\d{0,9})(,?)(\d{0,9})\}")
LEADING_FLAGS = re.compile(r"\(\?([a-zA-Z]+)\)")
GROUP = re.compile(r"\((?:\?(?:P<\w+>|:)|(?!\?))")
AMBIGUOUS_IN_SET = "[&~|"
"""Python warns about these in a set, because they may get a meaning there; escaped they are characters."""


class BadRegex(ValueError):
    """An expression that cannot be matched in one pass. Its args: what an expression must be or do, what was found."""


@dataclass(frozen=True, slots=True)
class Character:
    """One character out of a set.

    pattern: a Python expression for exactly one character;  literal: that character, if it matches no other
    number:  among all characters of a program, repetitions written out
    """

    pattern: re.Pattern[str]
    literal: str | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Anchor:
    """A place in the text, one of the values of `ANCHORS`. Without the flag m, `^` is `\\A` and `$` is `\\Z`."""

    kind: str


@dataclass(frozen=True, slots=True)
class Join:
    """One part after the other; no part is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part `lowest` to `highest` times; None is without end."""

    part: Node
    lowest: int
    highest: int | None


Node = Character | Anchor | Join | Choice | Repeat


class RegexReader:
    """Reads expressions one after the other.

    num_cased: characters in ranges beside the flag i so far; Python looks at each of them
    """

    num_cased = 0

    def read(self, source: str) -> Node:
        """Read characters, sets, groups, alternatives, repetitions, anchors, and the flags `(?imsa)` in front.

        Lazy repetitions are read as greedy ones: where a match begins is the same. Raises BadRegex for what is
        malformed, and for what needs backtracking: back-references, look-around, atomic groups.
        """
        self._source, self._at, self._depth, self._flags = source, 0, 0, 0
        while leading := self._match(LEADING_FLAGS):
            for letter in leading[1]:
                if letter not in FLAGS:
                    self._refuse(f"the flag {letter!r} is none of {', '.join(FLAGS)}")
                self._flags |= FLAGS[letter]
        tree = self._alternatives()
        if self._at < len(self._source):
            self._refuse("a parenthesis is closed that was not opened")
        return tree

    def _alternatives(self) -> Node:
        parts = [self._join()]
        while self._take("|"):
            parts.append(self._join())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _join(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Join(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        counts = self._counts()
        if counts is None:
            return part
        if isinstance(part, Anchor):
            self._refuse("a place cannot be repeated")
        self._take("?")
        if self._source.startswith("+", self._at):
            self._refuse("a possessive repetition is not supported")
        if self._counts() is not None:
            self._refuse("a repetition is repeated; put the inner one into (?:…)")
        return Repeat(part, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        found = self._match(COUNTS)
        if found is None or found[0] in SIGNS:
            return None if found is None else SIGNS[found[0]]
        lowest = int(found[1] or 0)
        highest = (int(found[3]) if found[3] else None) if found[2] else lowest
        if lowest > MAX_REPEAT or (highest or 0) > MAX_REPEAT:
            self._refuse(f"a repetition counts to more than {MAX_REPEAT}")
        if highest is not None and highest < lowest:
            self._refuse("a repetition's highest count is below its lowest")
        return (lowest, highest)

    def _atom(self) -> Node:
        character, two = self._source[self._at], self._source[self._at : self._at + 2]
        if character == "(":
            return self._group()
        if character == "[":
            return self._character(self._set())
        if character in "*+?":
            self._refuse("there is nothing to repeat")
        if (anchor := two if two in ANCHORS else character) in ANCHORS:
            self._at += len(anchor)
            kind = ANCHORS[anchor]
            return Anchor(kind if self._flags & re.MULTILINE else {"start": "first", "end": "last"}.get(kind, kind))
        if character == "\\":
            return self._character(self._escape())
        self._at += 1
        if character == ".":
            return self._character(character)
        return self._character(re.escape(character), literal=character)

    def _group(self) -> Node:
        if self._match(GROUP) is None:
            self._refuse("back-references, looking ahead or behind and flags inside are not supported")
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._refuse(f"groups are nested more than {MAX_NESTING} deep")
        tree = self._alternatives()
        self._depth -= 1
        if not self._take(")"):
            self._refuse("a parenthesis is not closed")
        return tree

    def _escape(self) -> str:
        found = self._match(ESCAPE)
        if found is None:
            self._refuse(f"{self._source[self._at : self._at + 2]!r} is no escape that is supported")
        return found[0]

    def _set(self) -> str:
        """Return the source of a set, with what Python warns about escaped."""
        begin = self._at
        self._at += 1
        pieces = ["[^" if self._take("^") else "["]
        while len(pieces) == 1 or not self._take("]"):
            if self._at >= len(self._source):
                self._at = begin
                self._refuse("a set is not closed")
            if self._take("\\b"):
                pieces.append("\\x08")
            elif (character := self._source[self._at]) == "\\":
                pieces.append(self._escape())
            else:
                pieces.append(f"\\{character}" if character in AMBIGUOUS_IN_SET or character == "]" else character)
                self._at += 1
        self._count_cased(pieces)
        if "--" in self._source[begin : self._at]:
            self._refuse("two dashes stand side by side in a set; escape one of them")
        return "".join(pieces) + "]"

    def _count_cased(self, pieces: Sequence[str]) -> None:
        """Refuse ranges that are too wide to be compiled for both cases."""
        if not self._flags & re.IGNORECASE:
            return
        for lowest, dash, highest in zip(pieces, pieces[1:], pieces[2:], strict=False):
            if dash == "-":
                self.num_cased += max(0, _code(highest) - _code(lowest))
        if self.num_cased > MAX_CASED:
            self._refuse(f"ranges beside the flag i span more than {MAX_CASED} characters together; leave i away")

    def _character(self, source: str, *, literal: str | None = None) -> Character:
        try:
            pattern = re.compile(source, self._flags & ~re.MULTILINE)
        except re.error as error:
            self._refuse(f"the set {source!r} cannot be read: {error.msg}")
        return Character(pattern, literal=None if self._flags & re.IGNORECASE else literal)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._source, self._at)
        self._at = self._at if found is None else found.end()
        return found

    def _take(self, expected: str) -> bool:
        is_there = self._source.startswith(expected, self._at)
        self._at += len(expected) * is_there
        return is_there

    def _refuse(self, reason: str) -> NoReturn:
        raise BadRegex("be of the supported syntax", f"{reason} (at character {self._at})")


def _code(piece: str) -> int:
    """Return the character that a piece of a set stands for; 0 for a class of them."""
    return int(piece[2:], 16) if piece[:2] in ("\\x", "\\u") else ord(piece[-1])
