"""Several models side by side on one prompt: one request, computed in the same batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from serve_app.cli.client import Service
from serve_app.cli.exits import CommandFailed, Exit
from serve_app.cli.screen import console, is_watched, say, say_json, visible

if TYPE_CHECKING:
    from rich.table import Table

PATH = "/v1/completions"
MAX_MODELS = 16
"""Of one request."""
LEAST_WIDTH = 24
"""Of a column; narrower ones stand below each other."""
ALIKE = "dim"


def compare_models(
    service: Service,
    prompt: str,
    models: Sequence[str] | None,
    parameters: Mapping[str, object],
    *,
    as_json: bool,
) -> int:
    """Raises CommandFailed where there are not two of them, ServiceFailed."""
    names = tuple(str(each["id"]) for each in service.models())[:MAX_MODELS] if models is None else tuple(models)
    if len(names) < 2:
        found = f"there is {names[0]} alone" if names else "there is none"
        raise CommandFailed(f"A comparison takes two models or more, as in --models demo,demo:pirate; {found}.")
    answer = service.json(PATH, {**parameters, "model": list(names), "prompt": prompt}, member="choices")
    if as_json:
        say_json(answer)
        return Exit.DONE
    num_each = len(answer["choices"]) // len(names)
    texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    for sample in range(num_each):
        _show(names, texts[sample::num_each])
    return Exit.DONE


def common_length(texts: Sequence[str]) -> int:
    """Characters at the beginning that all texts have alike."""
    shortest = min(texts, key=len)
    return next((at for at, each in enumerate(shortest) if any(text[at] != each for text in texts)), len(shortest))


def _show(names: Sequence[str], texts: Sequence[str]) -> None:
    """In columns where they are wide enough and somebody looks, otherwise one below the other."""
    terminal = console()
    if is_watched() and terminal.width // len(names) >= LEAST_WIDTH:
        terminal.print(_table(names, [visible(text) for text in texts]))
        return
    for name, text in zip(names, texts, strict=True):
        say(f"── {name}\n{text.strip()}\n")


def _table(names: Sequence[str], texts: Sequence[str]) -> Table:
    """What all have alike at their beginning is dim."""
    from rich.table import Table
    from rich.text import Text

    num_alike = common_length(texts)
    table = Table(expand=True)
    for name in names:
        table.add_column(Text(name), ratio=1, overflow="fold")
    table.add_row(*(Text.assemble((text[:num_alike], ALIKE), text[num_alike:]) for text in texts))
    return table
