"""Finds marks in a text that is still growing."""

from __future__ import annotations

import re

_SPACE = re.compile(r"[ \t\r\n]*")


def skip_space(text: str, at: int) -> int:
    """The place of the first character from there that is no white space of JSON."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def num_held(text: str, mark: str) -> int:
    """How many last characters may be the mark's beginning."""
    most = min(len(text), len(mark) - 1)
    return next((length for length in range(most, 0, -1) if mark.startswith(text[-length:])), 0)
