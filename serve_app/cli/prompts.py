"""What is asked: an argument, or what a pipe brings."""

from __future__ import annotations

import sys

from serve_app.cli.exits import CommandFailed, Exit

PIPE = "-"


def read_prompt(argument: str | None) -> str:
    """The argument, or all of stdin. Raises CommandFailed where there is neither."""
    found = read_message(argument)
    if found is None:
        raise CommandFailed("There is no prompt: write one behind the command, or pipe one in.", Exit.MISUSED)
    return found


def read_message(argument: str | None) -> str | None:
    """The argument, or all of stdin; None where a person sits at it. A pipe's last line break is none of it."""
    if argument not in (None, PIPE):
        return argument
    if argument is None and sys.stdin.isatty():
        return None
    return sys.stdin.read().removesuffix("\n")
