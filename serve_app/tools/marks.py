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
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0
