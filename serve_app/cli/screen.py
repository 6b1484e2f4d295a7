"""The terminal: consoles and tables of rich, texts of models made harmless, JSON for programs, and exit codes."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "SERVE_APP_URL"
KEY_VARIABLE = "SERVE_APP_KEY"
"""With a key, which stays out of the list of processes there."""
KEY_VARIABLES = (KEY_VARIABLE, "SERVE_APP_API_KEY")

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Categories of characters that move, colour or hide others."""
PLAIN = "\n\t"


class Exit(IntEnum):
    """Exit codes; each command documents no others."""

    DONE = 0
    FAILED = 1
    MISUSED = 2
    UNREACHABLE = 3
    REFUSED = 4
    SERVICE_FAILED = 5
    FAULT = 70
    INTERRUPTED = 130


MEANINGS: Mapping[Exit, str] = {
    Exit.DONE: "it was done; of a check: nothing is wrong",
    Exit.FAILED: "it could not be done here, or a check found something wrong",
    Exit.MISUSED: "there is no such command, option or value; the nearest one is named",
    Exit.UNREACHABLE: "no service answers at the address",
    Exit.REFUSED: "the service refused the request: a wrong parameter, an unknown model, a missing key",
    Exit.SERVICE_FAILED: "the service is full, still loading, failed, or broke off; the same request may do later",
    Exit.FAULT: "a fault of serve_app itself; `SERVE_APP_DEBUG=1` shows where",
    Exit.INTERRUPTED: "a person interrupted it",
}
"""By code, for the documents."""


class CommandFailed(Exception):
    """What was asked cannot be done; the message is for a person and names the next step where there is one."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = code


def console() -> Console:
    """Return a console of stdout. It respects NO_COLOR, COLUMNS and pipes, and takes nothing in a text for markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False)


def remarks() -> Console:
    """Return a console of stderr, for what is said about an answer and is none of it."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def is_watched() -> bool:
    """Return whether a person looks at stdout."""
    return sys.stdout.isatty()


def say(text: str = "") -> None:
    """Write a line of an answer, unchanged where a program reads it."""
    print(shown(text), flush=True)


def write(text: str) -> None:
    """Write a piece of an answer, without a line's end."""
    sys.stdout.write(shown(text))
    sys.stdout.flush()


@contextmanager
def whole_lines() -> Iterator[None]:
    """End the line of what is written inside. Where that breaks off, only a person gets a new line."""
    try:
        yield
    except BaseException as failure:
        if is_watched() and not isinstance(failure, OSError):
            say()
        raise
    say()


@contextmanager
def progress(total: int) -> Iterator[Callable[[], object]]:
    """Show a bar of requests on stderr where a person looks at it; what is given moves it on by one."""
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    terminal = remarks()
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as shown:
        task = shown.add_task("requests", total=total)
        yield lambda: shown.advance(task)


def remark(text: str) -> None:
    """Write a line beside the answer."""
    print(visible(text), file=sys.stderr, flush=True)


def say_json(value: object) -> None:
    """Write a JSON value: on several lines for a person, on one for a program. What a terminal obeys is escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=2 if is_watched() else None)
    print(text if text.isascii() else "".join(map(_escaped, text)), flush=True)


def answer(found: object, words: str, *, as_json: bool) -> int:
    """Write what was found for a program, or the words for a person; the exit code."""
    if as_json:
        say_json(found)
    else:
        say(words)
    return Exit.DONE


def shown(text: str) -> str:
    """Return the text, made harmless where a terminal would obey it."""
    return visible(text) if is_watched() else text


def visible(text: str) -> str:
    """Return the text with what a terminal obeys written as in code; line breaks and tabs stay."""
    return "".join(_written_out(each) for each in text)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int | None = None) -> Table:
    """Return a table whose first columns are texts and the others numbers. texts: how many; None is all"""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="dim")
    for at, head in enumerate(heads):
        made.add_column(head, justify="left" if texts is None or at < texts else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(visible(cell)) for cell in row))
    return made


def common_length(texts: Sequence[Sequence[object]]) -> int:
    """Return how many characters, or tokens, all have alike at their beginning."""
    shortest = min(texts, key=len, default=())
    return next((at for at, each in enumerate(shortest) if any(text[at] != each for text in texts)), len(shortest))


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode() if _is_hidden(character) else character


def _escaped(character: str) -> str:
    """Return the character as JSON escapes it."""
    return json.dumps(character)[1:-1] if _is_hidden(character) else character


def _is_hidden(character: str) -> bool:
    return character not in PLAIN and unicodedata.category(character) in HIDDEN
