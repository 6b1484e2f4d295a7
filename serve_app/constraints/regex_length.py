"""Tells how long the shortest text is that a regular expression matches, as far as that is plain from its counts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MOST = 10**12
"""Counts go no further."""
TOKEN = re.compile(
    r"""(?P<nothing>\^|\$|\\[bBAzZ]|\(\?[a-zA-Z-]*\))
    |(?P<opens>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?)
    |(?P<closes>\))
    |(?P<or>\|)
    |(?P<count>(?:[*+?]|\{\s*\d+\s*(?:,\s*(?:\d+\s*)?)?\})\??)
    |(?P<one>\\[pPxuU]\{[^}]*\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\.
        |\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]
        |.)""",
    re.VERBOSE | re.DOTALL,
)
FIRST_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class _Group:
    """One that is still open. ended: the lengths of its options before the last `|`; parts: of what follows that"""

    ended: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def end_option(self) -> None:
        self.ended.append(min(sum(self.parts), MOST))
        self.parts = []

    def shortest(self) -> int:
        self.end_option()
        return min(self.ended)


def shortest_match(regex: str) -> int:
    """Characters of the shortest text, at most `MOST`; 0 where parentheses do not fit together."""
    groups = [_Group()]
    for token in TOKEN.finditer(regex):
        match token.lastgroup:
            case "opens":
                groups.append(_Group())
            case "closes" if len(groups) == 1:
                return 0
            case "closes":
                length = groups.pop().shortest()
                groups[-1].parts.append(length)
            case "or":
                groups[-1].end_option()
            case "count" if groups[-1].parts:
                groups[-1].parts[-1] = min(groups[-1].parts[-1] * _least(token.group()), MOST)
            case "nothing":
                groups[-1].parts.append(0)
            case "one":
                groups[-1].parts.append(1)
    return groups[0].shortest() if len(groups) == 1 else 0


def _least(count: str) -> int:
    """Times that it asks for at least; no more digits of them are read than mean something."""
    number = FIRST_NUMBER.search(count)
    if number is None:
        return int(count.startswith("+"))
    return min(int(number.group()[-20:]), MOST)
