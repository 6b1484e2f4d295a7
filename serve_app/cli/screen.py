"""The terminal: consoles of rich, texts of models made harmless, and JSON for programs."""

from __future__ import annotations

import json
import sys
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Categories of characters that move, colour or hide others."""
PLAIN = "\n\t"


def console() -> Console:
    """Of stdout; NO_COLOR, COLUMNS and pipes are respected, and nothing in a text is markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False)


def remarks() -> Console:
    """Of stderr: what is said about an answer, and is none of it."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def is_watched() -> bool:
    """Whether a person looks at stdout."""
    return sys.stdout.isatty()


def say(text: str = "") -> None:
    """A line of an answer, as it is where a program reads it."""
    print(shown(text), flush=True)


def write(text: str) -> None:
    """A piece of an answer, without a line's end."""
    sys.stdout.write(shown(text))
    sys.stdout.flush()


def remark(text: str) -> None:
    """A line beside the answer."""
    print(visible(text), file=sys.stderr, flush=True)


def say_json(value: object) -> None:
    """One JSON value: on several lines for a person, on one for a program."""
    print(json.dumps(value, ensure_ascii=False, indent=2 if is_watched() else None), flush=True)


def shown(text: str) -> str:
    """Harmless where a terminal would obey it."""
    return visible(text) if is_watched() else text


def visible(text: str) -> str:
    """The same with what a terminal obeys written as in code; line breaks and tabs stay."""
    return "".join(_written_out(each) for each in text)


def _written_out(character: str) -> str:
    if character in PLAIN or unicodedata.category(character) not in HIDDEN:
        return character
    return character.encode("unicode_escape").decode()
