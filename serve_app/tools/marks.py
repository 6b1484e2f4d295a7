"""Finds marks in a text that is still growing."""

from __future__ import annotations

import re
from collections.abc import Iterable


class MarkFinder:
    """Of marks that begin at the same place, the longest counts."""

    def __init__(self, marks: Iterable[str]) -> None:
        longest_first = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = frozenset(mark[:size] for mark in longest_first for size in range(1, len(mark)))
        firsts = "".join({mark[0] for mark in longest_first})
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        self._longest = max(map(len, longest_first), default=0)

    def find(self, text: str, *, is_last: bool = False) -> tuple[int, str]:
        """Return the place of the first mark, and that mark; "" where what stands there may still become one.

        Without either, the place is the text's end. is_last: the text does not grow any more
        """
        found = self._pattern.search(text)
        held = len(text) if is_last else len(text) - self._num_held(text)
        if found is not None and (found.start() < held or is_last):
            return found.start(), found.group()
        return held, ""

    def may_begin(self, text: str) -> bool:
        """Whether a mark begins the text, or may do so when there is more of it."""
        return not text or text in self._beginnings or self._pattern.match(text) is not None

    def _num_held(self, text: str) -> int:
        """How many last characters may be the beginning of a mark."""
        at = max(0, len(text) - self._longest + 1)
        while (found := self._first.search(text, at)) is not None:
            if text[found.start() :] in self._beginnings:
                return len(text) - found.start()
            at = found.end()
        return 0
