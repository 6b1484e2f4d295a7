"""Turns regular expressions into one automaton that reads a text once, character by character."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from serve_app.text.regex_syntax import Anchor, BadRegex, Character, Choice, Empty, Join, Node, Repeat, parse_regex

MAX_STATES = 1000
"""What all expressions of one request may add up to; it bounds the work for one character."""

MAX_REMEMBERED = 4096
UNKNOWN = "unknown"
"""Stands for the next character where nothing is known of it."""
TAIL = "tail"
"""Stands for the next character where the text has grown to here and may go on: `$` holds, a word may go on."""
LOOKING_AHEAD = frozenset({"end", "last", "word", "no-word"})


@dataclass(frozen=True, slots=True)
class Read:
    """Read one character of a set and go on."""

    character: Character
    to: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Go on at each of these places without reading."""

    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """Go on where the place in the text is the one meant."""

    anchor: Anchor
    to: int


@dataclass(frozen=True, slots=True)
class Accept:
    """An expression is complete, by its number."""

    number: int


State = Read | Fork | Check | Accept


class Program:
    """A nondeterministic automaton of several expressions (Thompson 1968).

    sources: the expressions, in the order of their numbers;  start: the state where each begins
    """

    def __init__(self, sources: tuple[str, ...]) -> None:
        """Raises BadRegex."""
        self.sources = sources
        self.states: list[State] = []
        starts = []
        for number, source in enumerate(sources):
            starts.append(self._build(parse_regex(source), self._add(Accept(number))))
        self.start = self._add(Fork(tuple(starts)))
        reached = self._reached_without_reading()
        self._first_reads = [state for state in reached if isinstance(state, Read)]
        self._first_characters: dict[str, bool] = {}
        for number in sorted(state.number for state in reached if isinstance(state, Accept)):
            raise BadRegex("match no empty text", found=repr(sources[number]))

    def settle(self, places: Iterable[int], seen: set[int], *, before: str | None, after: str | None) -> list[State]:
        """What can be read or is complete from these states, without reading.

        seen:   states found before, which are left out; what is found is added
        before, after: the characters around the place; None is the text's border. Where what comes after is UNKNOWN,
                anchors that depend on it hold nowhere; where it is TAIL, the text's end does
        """
        found: list[State] = []
        pending = list(places)
        while pending:
            place = pending.pop()
            if place in seen:
                continue
            seen.add(place)
            state = self.states[place]
            match state:
                case Fork():
                    pending += state.to
                case Check():
                    if holds(state.anchor, before, after):
                        pending.append(state.to)
                case Read() | Accept():
                    found.append(state)
                case _:
                    assert_never(state)
        return found

    def may_begin(self, character: str) -> bool:
        """Whether a match may begin with the character. Without reading one none can be complete."""
        known = self._first_characters.get(character)
        if known is None:
            if len(self._first_characters) >= MAX_REMEMBERED:
                self._first_characters.clear()
            known = any(state.character.pattern.match(character) for state in self._first_reads)
            self._first_characters[character] = known
        return known

    def _reached_without_reading(self) -> list[State]:
        """Where the beginning leads without a character, every anchor taken to hold."""
        reached = {self.start}
        pending = [self.start]
        while pending:
            state = self.states[pending.pop()]
            following = state.to if isinstance(state, Fork) else (state.to,) if isinstance(state, Check) else ()
            pending += [place for place in following if place not in reached]
            reached.update(following)
        return [self.states[place] for place in reached]

    def _add(self, state: State) -> int:
        if len(self.states) >= MAX_STATES:
            raise BadRegex(f"have at most {MAX_STATES} states together, repetitions written out", found="more")
        self.states.append(state)
        return len(self.states) - 1

    def _build(self, node: Node, to: int) -> int:
        """Add states that read the node and then go on at `to`; give the first."""
        match node:
            case Empty():
                return to
            case Character():
                return self._add(Read(node, to))
            case Anchor():
                return self._add(Check(node, to))
            case Join():
                for part in reversed(node.parts):
                    to = self._build(part, to)
                return to
            case Choice():
                return self._add(Fork(tuple(self._build(part, to) for part in node.parts)))
            case Repeat():
                return self._build_repeat(node, to)
            case _:
                assert_never(node)

    def _build_repeat(self, node: Repeat, to: int) -> int:
        if node.highest is None:
            loop = self._add(Fork(()))
            self.states[loop] = Fork((self._build(node.part, loop), to))
            to = loop
        else:
            end = to
            for _ in range(node.highest - node.lowest):
                to = self._add(Fork((self._build(node.part, to), end)))
        for _ in range(node.lowest):
            to = self._build(node.part, to)
        return to


@lru_cache(maxsize=64)
def program_of(sources: tuple[str, ...]) -> Program:
    """The program of these expressions; the last ones asked for are kept. Raises BadRegex."""
    return Program(sources)


def holds(anchor: Anchor, before: str | None, after: str | None) -> bool:
    """Is the place between these characters certainly one that the anchor means?"""
    if after == TAIL and anchor.kind in ("end", "last"):
        return True
    if after in (UNKNOWN, TAIL) and anchor.kind in LOOKING_AHEAD:
        return False
    match anchor.kind:
        case "first":
            return before is None
        case "last":
            return after is None
        case "start":
            return before is None or before == "\n"
        case "end":
            return after is None or after == "\n"
        case kind:
            return (_is_of_word(before) != _is_of_word(after)) is (kind == "word")


def _is_of_word(character: str | None) -> bool:
    return character is not None and (character.isalnum() or character == "_")
