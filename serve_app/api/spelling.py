"""Finds the known name that a misspelled one was meant to be."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

MAX_CHARS = 64


@lru_cache(maxsize=1024)
def nearest(name: str, known: tuple[str, ...]) -> str | None:
    """The known name that `name` is within a few edits of, case folded; None where it is like none of them.

    Short names have few edits to be mistaken by: up to three letters none, up to seven letters one, else two.
    """
    if len(name) > MAX_CHARS:
        return None
    folded = name.casefold()
    distances = {other: _distance(folded, other, at_most=_num_edits(folded, other)) for other in known}
    found = {other: distance for other, distance in distances.items() if distance is not None}
    return min(found, key=lambda other: (found[other], other), default=None)


def _num_edits(name: str, other: str) -> int:
    length = min(len(name), len(other))
    return 0 if length <= 3 else 1 if length <= 7 else 2


def _distance(left: str, right: str, *, at_most: int) -> int | None:
    """Letters left out, put in, exchanged, or swapped with their neighbour (Damerau); None where it takes more."""
    if abs(len(left) - len(right)) > at_most:
        return None
    missing, surplus = Counter(left) - Counter(right), Counter(right) - Counter(left)
    if max(missing.total(), surplus.total()) > at_most:
        return None
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, letter in enumerate(left, 1):
        before, above, row = row, before, [i]
        for j, other in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == right[j - 2] and left[i - 2] == other:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1] if row[-1] <= at_most else None
