"""Reads a regular expression into a tree, in the part of Python's syntax that can be matched in one pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

MAX_NESTING = 50
MAX_REPEAT = 1000
MAX_CASED = 25_000

ANCHORS = {"^": "start", "$": "end", "\\A": "first", "\\Z": "last", "\\b": "word", "\\B": "no-word"}
FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "a": re.ASCII}
ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfva]|[^\w])", re.DOTALL)
COUNTS = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}")
LEADING_FLAGS = re.compile(r"\(\?([a-zA-Z]+)\)")
GROUP = re.compile(r"\(\?(?:P<\w+>|:)")
AMBIGUOUS_IN_SET = "[&~|"
"""Python warns of these in a set, as they may get a meaning there; escaped they are characters."""


class BadRegex(ValueError):
    """An expression that cannot be matched in one pass over a text.

    must: what an expression must be or do;  found: what this one is or does
    """

    def __init__(self, must: str, *, found: str) -> None:
        super().__init__(f"must {must}; found {found}")
        self.must = must
        self.found = found


@dataclass(frozen=True, slots=True)
class Empty:
    """Matches the empty text."""


@dataclass(frozen=True, slots=True)
class Character:
    """One character out of a set.

    pattern: an expression of Python's for exactly one character;  literal: that one, where it matches no other
    number:  of the character among all of a program, repetitions written out
    """

    pattern: re.Pattern[str]
    literal: str | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Anchor:
    """A place, one of the values of `ANCHORS`. `^` and `$` without the flag m are read as the first and the last."""

    kind: str


@dataclass(frozen=True, slots=True)
class Join:
    """One part after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part so many times; no highest is without end."""

    part: Node
    lowest: int
    highest: int | None


Node = Empty | Character | Anchor | Join | Choice | Repeat


def parse_regexes(sources: tuple[str, ...]) -> Iterator[Node]:
    """Read characters, sets, groups, alternatives, repetitions, anchors, and the flags `(?imsa)` in front.

    Raises BadRegex: for what is malformed, and for what needs backtracking (back-references, looking around,
    atomic groups). Whether a repetition is lazy makes no difference to where a match begins.
    """
    num_cased = 0
    for source in sources:
        reader = _Reader(source, num_cased)
        yield reader.read()
        num_cased = reader.num_cased


class _Reader:
    """num_cased: characters in ranges beside the flag i so far, each of which Python looks at"""

    def __init__(self, source: str, num_cased: int) -> None:
        self._source = source
        self.num_cased = num_cased
        self._at = 0
        self._depth = 0
        self._flags = 0

    def read(self) -> Node:
        while leading := LEADING_FLAGS.match(self._source, self._at):
            for letter in leading[1]:
                if letter not in FLAGS:
                    self._refuse(f"the flag {letter!r} is none of {', '.join(FLAGS)}")
                self._flags |= FLAGS[letter]
            self._at = leading.end()
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
        return parts[0] if len(parts) == 1 else Join(tuple(parts)) if parts else Empty()

    def _repeated(self, part: Node) -> Node:
        counts = self._counts()
        if counts is None:
            return part
        if isinstance(part, Anchor):
            self._refuse("a place cannot be repeated")
        self._take("?")
        if self._source[self._at : self._at + 1] == "+":
            self._refuse("a possessive repetition is not supported")
        if self._counts() is not None:
            self._refuse("a repetition is repeated; put the inner one into (?:…)")
        return Repeat(part, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        if self._take("*"):
            return (0, None)
        if self._take("+"):
            return (1, None)
        if self._take("?"):
            return (0, 1)
        braces = COUNTS.match(self._source, self._at)
        if braces is None or braces[0] in ("{}", "{,}"):
            return None  # a brace that is no count is a character
        self._at = braces.end()
        lowest = int(braces[1] or 0)
        highest = (int(braces[3]) if braces[3] else None) if braces[2] else lowest
        if lowest > MAX_REPEAT or (highest or 0) > MAX_REPEAT:
            self._refuse(f"a repetition counts to more than {MAX_REPEAT}")
        if highest is not None and highest < lowest:
            self._refuse("a repetition's highest count is below its lowest")
        return (lowest, highest)

    def _atom(self) -> Node:
        character = self._source[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            return self._character(self._set())
        if character == "\\":
            return self._escaped()
        if character in "*+?":
            self._refuse("there is nothing to repeat")
        self._at += 1
        if character in ANCHORS:
            return self._anchor(character)
        return self._character(character if character == "." else re.escape(character), literal=character)

    def _group(self) -> Node:
        opening = GROUP.match(self._source, self._at)
        if opening is None and self._source.startswith("(?", self._at):
            self._refuse("back-references, looking ahead or behind and flags inside are not supported")
        self._at = opening.end() if opening else self._at + 1
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._refuse(f"groups are nested more than {MAX_NESTING} deep")
        tree = self._alternatives()
        self._depth -= 1
        if not self._take(")"):
            self._refuse("a parenthesis is not closed")
        return tree

    def _escaped(self) -> Node:
        two = self._source[self._at : self._at + 2]
        if two in ANCHORS:
            self._at += 2
            return self._anchor(two)
        return self._character(self._escape())

    def _escape(self) -> str:
        found = ESCAPE.match(self._source, self._at)
        if found is None:
            self._refuse(f"{self._source[self._at : self._at + 2]!r} is no escape that is supported")
        self._at = found.end()
        return found[0]

    def _set(self) -> str:
        """The source of a set, with what Python warns of escaped."""
        begin = self._at
        self._at += 1
        pieces = ["[^" if self._take("^") else "["]
        while True:
            if self._at >= len(self._source):
                self._at = begin
                self._refuse("a set is not closed")
            character = self._source[self._at]
            if character == "]" and len(pieces) > 1:
                break
            if character == "\\":
                is_backspace = self._source.startswith("\\b", self._at)
                self._at += 2 * is_backspace
                pieces.append("\\x08" if is_backspace else self._escape())
                continue
            pieces.append(f"\\{character}" if character in AMBIGUOUS_IN_SET or character == "]" else character)
            self._at += 1
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

    def _character(self, source: str, *, literal: str = ".") -> Character:
        is_literal = literal != "." and not self._flags & re.IGNORECASE
        try:
            pattern = re.compile(source, self._flags & ~re.MULTILINE)
            return Character(pattern, literal=literal if is_literal else None)
        except re.error as error:
            self._refuse(f"the set {source!r} cannot be read: {error.msg}")

    def _anchor(self, source: str) -> Anchor:
        kind = ANCHORS[source]
        if self._flags & re.MULTILINE:
            return Anchor(kind)
        return Anchor({"start": "first", "end": "last"}.get(kind, kind))

    def _take(self, expected: str) -> bool:
        is_there = self._source.startswith(expected, self._at)
        self._at += len(expected) * is_there
        return is_there

    def _refuse(self, reason: str) -> NoReturn:
        raise BadRegex("be of the supported syntax", found=f"{reason} (at character {self._at})")


def _code(piece: str) -> int:
    """The character that a piece of a set stands for; 0 for a class of them."""
    return int(piece[2:], 16) if piece[:2] in ("\\x", "\\u") else ord(piece[-1])
