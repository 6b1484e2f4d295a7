"""Marks the characters of a conversation that could make a special token, so that they are known in the rendered text.

What a template does to a text in between (cut, join, replace) does not take the marks off: a mark is one character in
the place of another. So a special token whose name is put together from pieces is found out as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.core.conversation import Rendering

FIRST_MARK = 0xF0000  # a plane for private use, in which no text of the world stands
TELLING = "|｜[]<>"
"""A special token's name is known by the first of these that is in it, which templates themselves hardly look for."""
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""What templates do look for in messages; whole, it is no special token unless the tokenizer says so."""
UNMARKED = frozenset({"role", "type"})
"""Members whose values are words of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Which characters are marked, and by what.

    pattern: finds a character to be marked in its first group, or something to be passed over
    by_char: the mark of each character;  end: a character of its own, which stands nowhere else
    """

    pattern: re.Pattern[str]
    by_char: dict[str, str]
    end: str

    def put(self, value: object) -> object:
        """The same value with its strings marked, those of members' names too."""
        match value:
            case str():
                return self.pattern.sub(self._marked, value)
            case list():
                return [self.put(element) for element in value]
            case dict():
                return {
                    self.put(name): member if name in UNMARKED and isinstance(member, str) else self.put(member)
                    for name, member in value.items()
                }
            case _:
                return value

    def keep(self, text: str) -> str:
        """Marks again where JSON in ASCII wrote escapes for them."""
        for mark in (*self.by_char.values(), self.end):
            text = text.replace(json.dumps(mark)[1:-1], mark)
        return text

    def take(self, text: str) -> Rendering:
        """The text without marks, and where they were."""
        by_mark = {mark: char for char, mark in self.by_char.items()}
        foreign = tuple(found.start() for found in re.finditer(f"[{''.join(by_mark)}]", text)) if by_mark else ()
        return Rendering(text=text.translate({ord(mark): char for mark, char in by_mark.items()}), foreign=foreign)

    def _marked(self, found: re.Match[str]) -> str:
        return found[0] if found["char"] is None else self.by_char[found["char"]]


def marks_for(special_names: Iterable[str], besides: str) -> Marks:
    """Marks that stand nowhere in `besides`, which is everything that is rendered."""
    names = sorted(filter(None, special_names), key=len, reverse=True)
    telling = {next((char for char in TELLING if char in name), "") for name in names} - {""}
    plain = [name for name in names if not any(char in name for char in telling)]
    passed = [each for each in MARKUP if each not in names]
    chars = [f"[{re.escape(''.join(sorted(telling)))}]"] if telling else []
    chars += [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in plain]
    pattern = f"(?:{'|'.join(map(re.escape, passed))})|(?P<char>{'|'.join(chars) or '(?!)'})"
    marked = sorted(telling | {name[0] for name in plain})
    marks = _unused(len(marked) + 1, besides)
    return Marks(pattern=re.compile(pattern), by_char=dict(zip(marked, marks, strict=False)), end=marks[-1])


def _unused(count: int, text: str) -> list[str]:
    found: list[str] = []
    candidate = FIRST_MARK
    while len(found) < count:
        if chr(candidate) not in text:
            found.append(chr(candidate))
        candidate += 1
    return found
