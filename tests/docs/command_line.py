"""The tables of docs/cli.md: the tree of commands with their options, and what each exit code means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serve_app.cli.screen import MEANINGS
from serve_app.cli.tree import command
from tests.docs.markdown import code, table

EVERYWHERE = frozenset({"--json", "--help", "-h", "--help-all", "--install-completion", "--show-completion"})
"""Told once, above the table."""


def command_tree() -> str:
    """Every command by the words that lead to it, with its own options."""
    return table(
        ["command", "what it does", "options"],
        [[code(f"serve_app {path}"), each.help, _options(each)] for path, each in _leaves(command())],
    )


def exit_codes() -> str:
    """Every code that a command ends with."""
    return table(["code", "when"], [[str(int(exit)), meaning] for exit, meaning in MEANINGS.items()])


def _leaves(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in group.commands.items():
        if not hasattr(each, "commands"):
            yield f"{path}{name}{_arguments(each)}", each
            continue
        if each.invoke_without_command:
            yield f"{path}{name}", each
        yield from _leaves(each, f"{path}{name} ")


def _arguments(each: Any) -> str:
    names = [
        (option.metavar or option.name.upper()).strip("[]")
        for option in each.params
        if option.param_type_name == "argument"
    ]
    return "".join(f" {name}" for name in names)


def _options(each: Any) -> str:
    """Those of a table too, unless that is the contract's, which has a page of its own."""
    written = [option.opts for option in each.params if option.param_type_name == "option"]
    is_short = any("--help-all" in names for names in written)
    flags = [names[0] for names in written if not EVERYWHERE & set(names)]
    flags += [] if is_short or not hasattr(each, "offers") else [offer.flag for offer in each.offers()]
    return ", ".join(map(code, flags)) or "–"
