"""Turns regular expressions into sets of positions that a text is read with once, character by character."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import assert_never

from serve_app.text.regex_syntax import Anchor, BadRegex, Character, Choice, Empty, Join, Node, Repeat, parse_regexes

MAX_POSITIONS = 128
"""Characters that all expressions of one request may have together; it bounds the work for one character."""
MAX_CLASSES = 64
"""Different sets of characters among them; it bounds the work for a character that was not seen before."""
MAX_REMEMBERED = 512

UNKNOWN = "unknown"
"""Stands for the next character where nothing is known of it."""
TAIL = "tail"
"""Stands for the next character where the text has grown to here and may go on: `$` holds, a word may go on."""
LOOKING_AHEAD = frozenset({"end", "last", "word", "no-word"})


Ends = tuple[int, int, bool]
"""Of a part of an expression: the positions that it may begin with and end with, and whether it may be empty."""
NOTHING: Ends = (0, 0, True)


class Following:
    """Which positions follow a set of positions; of the last ones asked for each is computed once."""

    def __init__(self, links: list[int]) -> None:
        """links: of each position those that follow it"""
        tables = [_unions(links[start : start + 4]) for start in range(0, len(links), 4)]
        self._tables = list(zip_longest(tables[::2], tables[1::2], fillvalue=[0]))
        self._known: dict[int, int] = {0: 0}

    def of(self, positions: int) -> int:
        """The set that follows."""
        found = self._known.get(positions)
        if found is None:
            found = 0
            for eight, (low, high) in zip(positions.to_bytes(len(self._tables), "little"), self._tables, strict=True):
                if eight:
                    found |= low[eight & 15] | high[eight >> 4]
            if len(self._known) > MAX_REMEMBERED:
                self._known = {0: 0}
            self._known[positions] = found
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """Places in a text where the same anchors hold.

    first:  positions that a match may begin with here;  complete: behind which a match is complete
    follow: from the position of the character before to those of the next one;  precede: the other way
    """

    first: int
    complete: int
    follow: Following
    precede: Following


class Program:
    """The positions of several expressions and how they follow each other (Glushkov 1961), as bits of integers.

    sources: the expressions, in the order of their numbers;  of_source: the positions of each
    """

    def __init__(self, sources: tuple[str, ...]) -> None:
        """Raises BadRegex."""
        self.sources = sources
        self.of_source: list[int] = []
        self._anchors: set[str] = set()
        self._readers: list[Character] = []
        self._num_parts = 0
        trees = []
        for source, tree in zip(sources, parse_regexes(sources), strict=True):
            if _may_be_empty(tree):
                raise BadRegex("match no empty text", found=repr(source))
            begin = len(self._readers)
            trees.append(self._expanded(tree))
            self.of_source.append((1 << len(self._readers)) - (1 << begin))
        self._tree = Choice(tuple(trees))
        self._classes: dict[re.Pattern[str], int] = {}
        self._literals: dict[str, int] = {}
        for number, each in enumerate(self._readers):
            if each.literal is not None:
                self._literals[each.literal] = self._literals.get(each.literal, 0) | 1 << number
            else:
                self._classes[each.pattern] = self._classes.get(each.pattern, 0) | 1 << number
        if len(self._classes) > MAX_CLASSES:
            raise BadRegex(f"have at most {MAX_CLASSES} different sets of characters together", found="more")
        self._known: dict[str, int] = {}
        self._places: dict[frozenset[str], Place] = {}
        self._between: dict[tuple[str | None, str | None], Place] = {}

    def reading(self, character: str) -> int:
        """The positions that read this character."""
        found = self._known.get(character)
        if found is None:
            found = self._literals.get(character, 0)
            for pattern, positions in self._classes.items():
                if pattern.match(character):
                    found |= positions
            if len(self._known) > MAX_REMEMBERED:
                self._known = {}
            self._known[character] = found
        return found

    def between(self, before: str | None, after: str | None) -> Place:
        """The place between two characters; None is the text's border.

        Where what comes after is UNKNOWN, anchors that depend on it hold nowhere; where it is TAIL, the text's end
        does.
        """
        found = self._between.get((before, after))
        if found is None:
            holding = frozenset(kind for kind in self._anchors if holds(kind, before, after))
            found = self._places.get(holding) or self._place(holding)
            self._places[holding] = found
            if len(self._between) > MAX_REMEMBERED:
                self._between = {}
            self._between[before, after] = found
        return found

    def _place(self, holding: frozenset[str]) -> Place:
        forward, backward = [0] * len(self._readers), [0] * len(self._readers)
        first, last, _ = self._linked(self._tree, holding, forward)
        self._linked(self._tree, holding, backward, is_backward=True)
        return Place(first, last, Following(forward), Following(backward))

    def _linked(self, node: Node, holding: frozenset[str], links: list[int], *, is_backward: bool = False) -> Ends:
        """Add which position follows which in a part where these anchors hold; backwards from the text's end."""
        match node:
            case Character():
                return (1 << node.number, 1 << node.number, False)
            case Repeat():
                first, last, is_empty = self._linked(node.part, holding, links, is_backward=is_backward)
                if node.highest is None:
                    _link(links, last, first)
                return (first, last, is_empty or node.lowest == 0)
            case Join():
                first, last, is_empty = NOTHING
                for part in node.parts if is_backward else reversed(node.parts):
                    begins, ends, is_left_out = self._linked(part, holding, links, is_backward=is_backward)
                    _link(links, ends, first)
                    last = last | ends if is_empty else last
                    first = first | begins if is_left_out else begins
                    is_empty = is_empty and is_left_out
                return (first, last, is_empty)
            case Choice():
                first, last, is_empty = 0, 0, False
                for part in node.parts:
                    begins, ends, is_left_out = self._linked(part, holding, links, is_backward=is_backward)
                    first, last, is_empty = first | begins, last | ends, is_empty or is_left_out
                return (first, last, is_empty)
            case Anchor():
                return (0, 0, node.kind in holding)
            case Empty():
                return NOTHING
            case _:
                assert_never(node)

    def _expanded(self, node: Node) -> Node:
        """The same with repetitions written out, but for loops, and with a number for each character."""
        self._num_parts += 1
        is_full = len(self._readers) == MAX_POSITIONS and isinstance(node, Character)
        if is_full or self._num_parts > 8 * MAX_POSITIONS:
            must = f"have at most {MAX_POSITIONS} characters together, repetitions written out"
            raise BadRegex(must, found="more")
        match node:
            case Character():
                self._readers.append(replace(node, number=len(self._readers)))
                return self._readers[-1]
            case Anchor():
                self._anchors.add(node.kind)
                return node
            case Empty():
                return node
            case Join() | Choice():
                return replace(node, parts=tuple(self._expanded(part) for part in node.parts))
            case Repeat():
                loops = int(node.highest is None)
                copies = [self._expanded(node.part) for _ in range(node.lowest - loops)]
                if node.highest is None:
                    copies.append(Repeat(self._expanded(node.part), min(node.lowest, 1), None))
                for _ in range((node.highest or 0) - node.lowest):
                    copies.append(Repeat(self._expanded(node.part), 0, 1))
                return copies[0] if len(copies) == 1 else Join(tuple(copies))
            case _:
                assert_never(node)


@lru_cache(maxsize=16)
def program_of(sources: tuple[str, ...]) -> Program:
    """The program of these expressions; the last ones asked for are kept. Raises BadRegex."""
    return Program(sources)


def holds(kind: str, before: str | None, after: str | None) -> bool:
    """Is the place between these characters certainly one that the anchor means?"""
    if after == TAIL and kind in ("end", "last"):
        return True
    if after in (UNKNOWN, TAIL) and kind in LOOKING_AHEAD:
        return False
    match kind:
        case "first":
            return before is None
        case "last":
            return after is None
        case "start":
            return before is None or before == "\n"
        case "end":
            return after is None or after == "\n"
        case _:
            return (_is_of_word(before) != _is_of_word(after)) is (kind == "word")


def _may_be_empty(node: Node) -> bool:
    """Whether a part matches the empty text where every anchor holds."""
    match node:
        case Character():
            return False
        case Repeat():
            return node.lowest == 0 or _may_be_empty(node.part)
        case Join():
            return all(map(_may_be_empty, node.parts))
        case Choice():
            return any(map(_may_be_empty, node.parts))
        case Anchor() | Empty():
            return True
        case _:
            assert_never(node)


def _is_of_word(character: str | None) -> bool:
    return character is not None and (character.isalnum() or character == "_")


def _link(links: list[int], positions: int, following: int) -> None:
    """Add to what follows each of these positions."""
    while positions and following:
        lowest = positions & -positions
        links[lowest.bit_length() - 1] |= following
        positions ^= lowest


def _unions(links: list[int]) -> list[int]:
    """Of every subset of these what follows it."""
    unions = [0]
    for link in links:
        unions += [union | link for union in unions]
    return unions
