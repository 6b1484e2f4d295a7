"""Marks what a template itself writes of special tokens' names, so that all else is known to be a client's.

The template is rendered twice: as it is, which gives the text, and with marks in the place of those characters in its
own constants, which gives their places. What a client sent stays as it is, so a template finds in it what it looks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

FIRST_MARK = 0xF0000  # a plane for private use, in which no text of the world stands
TELLING = "|｜[]<>"
"""A special token's name is known by the first of these that is in it."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Words that may stand in a special token between pieces of a template, as in `'<|' + message.role + '|>'`."""


class Marks:
    """Marks for these special tokens that stand nowhere in `besides`."""

    def __init__(self, special_names: Iterable[str], besides: str) -> None:
        self._names = frozenset(filter(None, special_names))
        self._lengths = sorted({len(name) for name in self._names}, reverse=True)
        self._firsts = _any_of({name[0] for name in self._names})
        self._telling = {next((char for char in TELLING if char in name), "") for name in self._names} - {""}
        self._tells = _any_of(self._telling)
        cuts = [(name[:at], name[at:]) for name in self._names for at in range(1, len(name))]
        self._beginnings = {one for one, _ in cuts if not self._telling.isdisjoint(one)}
        self._ends = {other for _, other in cuts if not self._telling.isdisjoint(other)}
        chars = sorted({char for name in self._names for char in name} | self._telling)
        start = FIRST_MARK
        while re.search(f"[{chr(start)}-{chr(start + 2 * len(chars))}]", besides):
            start += 2 * len(chars) + 1
        self.end = chr(start)
        self._whole = {char: chr(start + 1 + at) for at, char in enumerate(chars)}
        self._piece = {char: chr(start + 1 + len(chars) + at) for at, char in enumerate(chars)}
        self._taken = {ord(mark): char for each in (self._whole, self._piece) for char, mark in each.items()}
        self._own = re.compile(f"[{chr(start)}-{chr(start + 2 * len(chars))}]")

    def stand_in(self, text: str) -> bool:
        """Whether the text has characters that are marks here."""
        return self._own.search(text) is not None

    def put(self, text: str) -> str:
        """Mark a template's constant: whole names, pieces of names at its ends, and telling characters."""
        marked, done = [], 0
        for start, end in self._spans(text):
            if start >= done:
                marked += [self._pieces(text[done:start]), "".join(self._whole[char] for char in text[start:end])]
                done = end
        return "".join([*marked, self._pieces(text[done:])])

    def take(self, marked: str) -> str:
        """The text without marks."""
        return marked.translate(self._taken)

    def foreign(self, text: str, marked: str, source: str) -> tuple[int, ...]:
        """Places of characters that the template did not write and that may be part of a special token.

        marked: the same text with marks;  source: all that a client sent
        """
        told = (each.start() for each in self._tells.finditer(text))
        found = {at for at in told if marked[at] == text[at]}
        whole, source = frozenset(self._whole.values()), source.lower()
        for start, end in self._spans(text):
            other = [at for at in range(start, end) if marked[at] not in whole]
            letters = "".join(text[at] for at in other if marked[at] == text[at])
            if letters and any(word not in ROLES and word in source for word in _words(letters.lower())):
                found.add(other[0])
        return tuple(sorted(found))

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """The longest name at each place where one begins."""
        for found in self._firsts.finditer(text):
            start = found.start()
            for length in self._lengths:
                if (name := text[start : start + length]) in self._names:
                    yield start, start + len(name)
                    break

    def _pieces(self, text: str) -> str:
        begin, end = 0, len(text)
        for size in range(1, min(len(text), self._lengths[0] if self._lengths else 0) + 1):
            begin = size if text[:size] in self._ends else begin
            end = len(text) - size if text[-size:] in self._beginnings else end
        return "".join(
            self._piece[char] if char in self._telling or at < begin or at >= end else char
            for at, char in enumerate(text)
        )


def _words(letters: str) -> list[str]:
    return re.findall(r"[^\W_]+", letters) or [letters]


def _any_of(chars: set[str]) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(''.join(sorted(chars)))}]" if chars else "(?!)")
