"""Cuts a growing text where a match of one of its regular expressions begins.

No library holds this contract: `regex` has partial matches but backtracks without bound, and re2 has no partial match.
So expressions become at most 128 positions (Glushkov 1961), which are bits of an integer; a character costs look-ups.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import zip_longest
from typing import assert_never

from serve_app.core.errors import InvalidRequest
from serve_app.text.regex_syntax import ANCHORS, Anchor, BadRegex, Character, Choice, Join, Node, RegexReader, Repeat

MAX_POSITIONS = 128
"""Characters of all expressions of a request, repetitions written out; bounds the work for one character."""
MAX_CLASSES = 64
"""Different character sets among them; bounds the work for a character that was not seen before."""
MAX_REMEMBERED = 512
FREE_STEPS = 256
"""Held characters that may be searched for a beginning before any budget was earned."""

UNKNOWN = "unknown"
"""Stands for the next character if nothing is known of it."""
TAIL = "tail"
"""Stands for the next character if the text ends here for now and may grow: `$` holds, and a word may go on."""
LOOKING_AHEAD = frozenset({"end", "last", "word", "no-word"})


def check_regexes(sources: tuple[str, ...], *, param: str = "stop_regex") -> None:
    """Raise InvalidRequest, which names the parameter, if the expressions cannot be matched in one pass."""
    try:
        program_of(sources)
    except BadRegex as error:
        must, found = error.args
        raise InvalidRequest.refusing(param, must=must, found=found) from None


class RegexStopMatcher:
    """Shows a text up to the place where a match begins, and nothing of the match.

    The text ends at the first character that completes a match. If several are complete there, the one that began
    first counts; if they began together, the expression named first. The split into pieces changes nothing, except for
    `$` and `\\Z`: they hold at the end of a piece, as in SGLang, which searches after each token. `\\b` waits for the
    next character or the end.

    Text is held back from the earliest place where an open match may have begun. Finding that place takes as many steps
    as characters are held, and each new character pays for two steps: so text that was held for long may be shown
    somewhat later. An expression without a longest match (`<a>.*</a>`) may hold text back to the end.

    The work for a character is bounded by the program's size, whatever the text and the expressions.

    matched:      the expression that ended the text
    matched_text: what it matched
    """

    def __init__(self, sources: tuple[str, ...]) -> None:
        """Compile the expressions. Raises BadRegex, which `check_regexes` reports to a client."""
        self._program = program_of(sources)
        self._reached = 0  # positions of the program behind what was read
        self._held = ""  # read and not shown
        self._before: str | None = None  # the character in front of what is held
        self._last: str | None = None  # the character read last
        self._num_steps = FREE_STEPS  # that may still be spent on looking for the beginning
        self.matched: str | None = None
        self.matched_text = ""

    def feed(self, text: str, *, is_tail: bool = True) -> str:
        """Take more of the text and return what is now certain to be shown; "" after a match.

        is_tail: this is all the text there is by now, so that `$` may hold behind it
        """
        if self.matched is not None:
            return ""
        program = self._program
        for number, character in enumerate(text):
            place = program.between(self._last, character)
            if self._reached & place.complete:  # what had to see the next character
                return self._end(text[:number], self._reached & place.complete)
            self._reached = (place.follow(self._reached) | place.first) & program.reading(character)
            self._last = character
            if self._reached and (complete := self._reached & program.between(character, UNKNOWN).complete):
                return self._end(text[: number + 1], complete)
        if text and is_tail and (complete := self._reached & program.between(self._last, TAIL).complete):
            return self._end(text, complete)
        self._held += text
        self._num_steps += 2 * len(text)
        if not self._reached:
            return self._show(len(self._held))
        if len(self._held) > self._num_steps:
            return ""
        self._num_steps -= len(self._held)
        return self._show(self._beginning(self._reached)[0])

    def flush(self) -> str:
        """End the text: return what was held back, up to a match that the end completes."""
        if self.matched is not None:
            return ""
        complete = self._reached & self._program.between(self._last, None).complete
        return self._end("", complete) if complete else self._show(len(self._held))

    def _end(self, text: str, complete: int) -> str:
        """End the text, `text` further on, where a match with one of these last positions is complete."""
        self._held += text
        begin, first = self._beginning(complete)
        number = next(number for number, positions in enumerate(self._program.of_source) if positions & first)
        self.matched, self.matched_text = self._program.sources[number], self._held[begin:]
        return self._held[:begin]

    def _beginning(self, reached: int) -> tuple[int, int]:
        """Return where in the held text the earliest match that reached these positions began, and its first ones."""
        begin, first = len(self._held), 0
        for at in range(len(self._held) - 1, -1, -1):
            before = self._held[at - 1] if at else self._before
            place = self._program.between(before, self._held[at])
            if reached & place.first:
                begin, first = at, reached & place.first
            if not at:
                break
            reached = place.precede(reached) & self._program.reading(self._held[at - 1])
            if not reached:
                break
        return begin, first

    def _show(self, num_chars: int) -> str:
        shown, self._held = self._held[:num_chars], self._held[num_chars:]
        self._before = shown[-1] if shown else self._before
        return shown


Ends = tuple[int, int, bool]
"""Of a part: the positions it may begin with, those it may end with, and whether it may be empty."""


@dataclass(frozen=True, slots=True)
class Place:
    """Places in a text where the same anchors hold.

    first:  positions that a match may begin with here;  complete: behind which a match is complete
    follow: from the positions of the character before to those of the next one;  precede: the other way
    """

    first: int
    complete: int
    follow: Callable[[int], int]
    precede: Callable[[int], int]


class Program:
    """The positions of several expressions and how they follow each other, as bits of integers.

    sources: the expressions, in the order of their numbers;  of_source: the positions of each
    reading: the positions that read a character
    between: the place between two characters; None is the text's border. UNKNOWN after it: anchors that depend on the
             next character hold nowhere; TAIL: the text's end holds
    """

    def __init__(self, sources: tuple[str, ...]) -> None:
        """Compile the expressions. Raises BadRegex."""
        self.sources = sources
        self.of_source: list[int] = []
        self._anchors: set[str] = set()
        self._readers: list[Character] = []
        self._num_parts = 0
        reader, trees = RegexReader(), []
        for source in sources:
            begin = len(self._readers)
            trees.append(self._expanded(reader.read(source)))
            _, _, is_empty = _linked(trees[-1], frozenset(ANCHORS.values()), [0] * len(self._readers))
            if is_empty:
                raise BadRegex("match no empty text", repr(source))
            self.of_source.append((1 << len(self._readers)) - (1 << begin))
        self._tree = Choice(tuple(trees))
        self._classes, self._literals = Counter[re.Pattern[str]](), Counter[str]()
        for each in self._readers:
            if each.literal is not None:
                self._literals[each.literal] |= 1 << each.number
            else:
                self._classes[each.pattern] |= 1 << each.number
        if len(self._classes) > MAX_CLASSES:
            raise BadRegex(f"have at most {MAX_CLASSES} different sets of characters together", "more")
        self.reading = lru_cache(MAX_REMEMBERED)(self._reading)
        self.between = lru_cache(MAX_REMEMBERED)(self._between)
        self._place_where = cache(self._place)

    def _reading(self, character: str) -> int:
        found = self._literals[character]
        for pattern, positions in self._classes.items():
            found |= positions if pattern.match(character) else 0
        return found

    def _between(self, before: str | None, after: str | None) -> Place:
        return self._place_where(frozenset(kind for kind in self._anchors if holds(kind, before, after)))

    def _place(self, holding: frozenset[str]) -> Place:
        forward, backward = [0] * len(self._readers), [0] * len(self._readers)
        first, last, _ = _linked(self._tree, holding, forward)
        for position, following in enumerate(forward):
            _link(backward, following, 1 << position)
        return Place(first, last, _union_of(forward), _union_of(backward))

    def _expanded(self, node: Node) -> Node:
        """Return the part with repetitions written out, except loops, and a number for each character."""
        self._num_parts += 1
        is_full = len(self._readers) == MAX_POSITIONS and isinstance(node, Character)
        if is_full or self._num_parts > 8 * MAX_POSITIONS:
            must = f"have at most {MAX_POSITIONS} characters together, repetitions written out"
            raise BadRegex(must, "more")
        match node:
            case Character():
                self._readers.append(replace(node, number=len(self._readers)))
                return self._readers[-1]
            case Anchor():
                self._anchors.add(node.kind)
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
    """Return the program of these expressions; the last ones are kept. Raises BadRegex."""
    return Program(sources)


def holds(kind: str, before: str | None, after: str | None) -> bool:
    """Return whether the place between these characters is certainly one that the anchor means."""
    if after == TAIL and kind in ("end", "last"):
        return True
    if after in (UNKNOWN, TAIL) and kind in LOOKING_AHEAD:
        return False
    edges = {
        "first": before is None,
        "last": after is None,
        "start": before in (None, "\n"),
        "end": after in (None, "\n"),
    }
    return edges[kind] if kind in edges else (_is_of_word(before) != _is_of_word(after)) is (kind == "word")


def _is_of_word(character: str | None) -> bool:
    return character is not None and (character.isalnum() or character == "_")


def _linked(node: Node, holding: frozenset[str], links: list[int]) -> Ends:
    """Add to `links` which position follows which in a part where these anchors hold, and return the part's ends."""
    match node:
        case Character():
            return (1 << node.number, 1 << node.number, False)
        case Repeat():
            first, last, is_empty = _linked(node.part, holding, links)
            if node.highest is None:
                _link(links, last, first)
            return (first, last, is_empty or node.lowest == 0)
        case Join():
            first, last, is_empty = 0, 0, True
            for part in reversed(node.parts):
                begins, ends, is_left_out = _linked(part, holding, links)
                _link(links, ends, first)
                last = last | ends if is_empty else last
                first = first | begins if is_left_out else begins
                is_empty = is_empty and is_left_out
            return (first, last, is_empty)
        case Choice():
            first, last, is_empty = 0, 0, False
            for part in node.parts:
                begins, ends, is_left_out = _linked(part, holding, links)
                first, last, is_empty = first | begins, last | ends, is_empty or is_left_out
            return (first, last, is_empty)
        case Anchor():
            return (0, 0, node.kind in holding)
        case _:
            assert_never(node)


def _link(links: list[int], positions: int, following: int) -> None:
    """Add `following` to what follows each of these positions."""
    while positions and following:
        lowest = positions & -positions
        links[lowest.bit_length() - 1] |= following
        positions ^= lowest


def _union_of(links: list[int]) -> Callable[[int], int]:
    """Return the function from a set of positions to the union of their links, by tables of four positions each."""
    tables = []
    for start in range(0, len(links), 4):
        unions = [0]
        for link in links[start : start + 4]:
            unions += [union | link for union in unions]
        tables.append(unions)

    pairs = list(zip_longest(tables[::2], tables[1::2], fillvalue=[0]))

    @lru_cache(MAX_REMEMBERED)
    def union(positions: int) -> int:
        found = 0
        for eight, (low, high) in zip(positions.to_bytes(len(pairs), "little"), pairs, strict=True):
            if eight:
                found |= low[eight & 15] | high[eight >> 4]
        return found

    return union
