"""The cells `%%complete`, `%%compare` and `%%grid`: options like `--max-tokens 32` on the first line, then prompts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas

from serve_app.lab.client import Client
from serve_app.lab.completion import Comparison, Completions

INTO, PATH = "into", "path"
CLIENT = "client"
"""The notebook's own client, where it has one of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """names: words without dashes;  options: what follows dashes, read as JSON where it is"""

    names: tuple[str, ...]
    options: Mapping[str, Any]


class MalformedLine(Exception):
    """An option of a cell's first line has no value."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext serve_app.lab` calls."""
    for name, cell in (("complete", complete_cell), ("compare", compare_cell), ("grid", grid_cell)):
        shell.register_magic_function(_magic(shell, cell), "cell", name)


def complete_cell(client: Client, line: Line, cell: str) -> Completions:
    """`%%complete [MODEL] [--max-tokens 32 …]`: the cell is one prompt, without its last line break."""
    return client.complete(cell.removesuffix("\n"), line.names[0] if line.names else None, **line.options)


def compare_cell(client: Client, line: Line, cell: str) -> Comparison:
    """`%%compare MODEL MODEL … [--max-tokens 32 …]`: each line of the cell is a prompt."""
    if len(line.names) < 2:
        raise MalformedLine("%%compare wants two models or more: %%compare demo demo:pirate --max-tokens 24")
    return client.compare(_prompts(cell), line.names, **line.options)


def grid_cell(client: Client, line: Line, cell: str) -> pandas.DataFrame:
    """`%%grid MODEL … [--max-tokens 32 … --path grid.jsonl]`: each line of the cell is a prompt."""
    if not line.names:
        raise MalformedLine("%%grid wants a model or more: %%grid demo demo:pirate --max-tokens 24")
    params = {name: value for name, value in line.options.items() if name != PATH}
    return client.grid(_prompts(cell), line.names, params, line.options.get(PATH))


def parsed(line: str) -> Line:
    """Read the first line; a dash within an option's name is an underscore of the parameter."""
    names: list[str] = []
    options: dict[str, Any] = {}
    words = iter(shlex.split(line))
    for word in words:
        if not word.startswith("--"):
            names.append(word)
            continue
        name, has_value, value = word.removeprefix("--").partition("=")
        if not has_value:
            value = next(words, "")
        if not value:
            raise MalformedLine(f"--{name} has no value: --{name}=…")
        options[name.replace("-", "_")] = _value(value)
    return Line(names=tuple(names), options=options)


def _prompts(cell: str) -> list[str]:
    return [prompt for prompt in cell.splitlines() if prompt.strip()]


def _magic(shell: Any, run: Callable[[Client, Line, str], Any]) -> Callable[[str, str], Any]:
    def magic(line: str, cell: str) -> Any:
        read = parsed(line)
        into = read.options.get(INTO)
        options = {name: value for name, value in read.options.items() if name != INTO}
        result = run(_client_of(shell), Line(names=read.names, options=options), cell)
        if into is not None:
            shell.user_ns[into] = result
        return result

    magic.__doc__ = run.__doc__
    return magic


def _client_of(shell: Any) -> Client:
    """The notebook's own, or one that the environment describes, which it has from then on."""
    if not isinstance(shell.user_ns.get(CLIENT), Client):
        shell.user_ns[CLIENT] = Client()
    client: Client = shell.user_ns[CLIENT]
    return client


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
