"""What error messages say of a value: how it is shown, and which known name a misspelled one was meant to be."""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache

MAX_SHOWN_CHARS = 60
MAX_SHOWN_BITS = 200


def shown(value: object) -> str:
    """Return the value as JSON if it is short, otherwise its beginning or its size."""
    match value:
        case bool() | None:
            return json.dumps(value)
        case int() if value.bit_length() > MAX_SHOWN_BITS:
            return f"an integer of about {int(value.bit_length() * 0.30103) + 1} digits"
        case str() if len(value) > MAX_SHOWN_CHARS:
            return f"{json.dumps(value[:MAX_SHOWN_CHARS])}… (a string of {len(value)} characters)"
        case list() if len(value) > 4:
            return f"a list of {len(value)} elements"
        case dict() if len(value) > 4:
            return f"an object of {len(value)} members"
        case list():
            return _shortened("[" + ", ".join(_brief(element) for element in value) + "]")
        case dict():
            members = (f"{json.dumps(str(key)[:20])}: {_brief(member)}" for key, member in value.items())
            return _shortened("{" + ", ".join(members) + "}")
        case _:
            return _shortened(json.dumps(value))


def _brief(value: object) -> str:
    """Return what `shown` returns, but only name a container inside a container."""
    match value:
        case list():
            return "[…]" if value else "[]"
        case dict():
            return "{…}" if value else "{}"
        case _:
            return shown(value)


def _shortened(text: str) -> str:
    return text if len(text) <= 2 * MAX_SHOWN_CHARS else text[: 2 * MAX_SHOWN_CHARS] + "…"


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
    """Return the Damerau-Levenshtein distance; None if it is more than `at_most`."""
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
