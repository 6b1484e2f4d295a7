"""Completes a prompt and shows what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from serve_app.cli.client import Service
from serve_app.cli.screen import (
    CommandFailed,
    Exit,
    console,
    is_watched,
    remark,
    say,
    say_json,
    visible,
    whole_lines,
    write,
)

if TYPE_CHECKING:
    from rich.table import Table


import sys

from serve_app.cli.screen import table

PATH = "/v1/completions"


def complete_prompt(
    service: Service,
    prompt: str,
    model: str | None,
    parameters: Mapping[str, object],
    *,
    streams: bool,
    as_json: bool,
) -> int:
    """Show the text of one choice as it comes, or every choice when all are here. Raises ServiceFailed."""
    body = {**parameters, "model": service.default_model(model), "prompt": prompt}
    if streams and is_single(parameters):
        with whole_lines():
            for event in service.events(PATH, body):
                write("".join(choice["text"] for choice in event["choices"]))
        return Exit.DONE
    answer = service.json(PATH, body, member="choices")
    if as_json:
        say_json(answer)
    else:
        _show(answer["choices"])
    return Exit.DONE


def is_single(parameters: Mapping[str, object]) -> bool:
    """Whether there is one text to be shown as it comes."""
    return parameters.get("n", 1) == 1 and parameters.get("best_of", 1) == 1


def _show(choices: list[dict[str, Any]]) -> None:
    """One text below the other; where there are several, each with its number on stderr."""
    for choice in choices:
        if len(choices) > 1:
            remark(f"[{choice['index']}] {choice['finish_reason']}")
        say(choice["text"])


COMPARED_PATH = "/v1/completions"
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
    answer = service.json(COMPARED_PATH, {**parameters, "model": list(names), "prompt": prompt}, member="choices")
    if as_json:
        say_json(answer)
        return Exit.DONE
    num_each = len(answer["choices"]) // len(names)
    texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    for sample in range(num_each):
        _show_compared(names, texts[sample::num_each])
    return Exit.DONE


def common_length(texts: Sequence[str]) -> int:
    """Characters at the beginning that all texts have alike."""
    shortest = min(texts, key=len)
    return next((at for at, each in enumerate(shortest) if any(text[at] != each for text in texts)), len(shortest))


def _show_compared(names: Sequence[str], texts: Sequence[str]) -> None:
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


EXPLAINED_PATH = "/v1/explain"
UNKNOWN = "unknown until it is computed"


def explain_request(
    service: Service,
    prompt: str,
    model: str | None,
    parameters: Mapping[str, object],
    *,
    is_chat: bool,
    as_json: bool,
) -> int:
    """What the service says of it; a request that it would refuse ends as the request would. Raises ServiceFailed."""
    asked: dict[str, object] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    body = {**parameters, "model": service.default_model(model), **asked}
    told = service.json(EXPLAINED_PATH, body, member="parts")
    if as_json:
        say_json(told)
    else:
        _show_explained(told)
    return Exit.REFUSED if any(part["refused_because"] for part in told["parts"]) else Exit.DONE


def _show_explained(told: Mapping[str, Any]) -> None:
    say(f"Nothing ran. Read in the dialect {told['dialect']}; choices: {told['choices']}.")
    for part in told["parts"]:
        _show_part(part)
    if told["ignored_parameters"]:
        say(f"ignored          {', '.join(told['ignored_parameters'])}")
    if told["cost_at_most"]:
        say(f"costs at most    {told['cost_at_most']:g}")
    limits = {name.replace("_", " "): limit for name, limit in told["limits"].items()}
    width = max([15, *map(len, limits)]) + 2
    for name, limit in limits.items():
        say(f"{name:<{width}}{limit['remaining']} of {limit['limit']} left")
    say()
    _show_parameters(told["parameters"])


def _show_part(part: Mapping[str, Any]) -> None:
    adapters = ", ".join(
        f"{each['name']} × {each['scale']:g}, version {each['version'][:12]}" for each in part["adapters"]
    )
    say(f"\n{part['model']}" + (f"  ({part['base']} with {adapters})" if adapters else ""))
    if part["refused_because"]:
        say(f"  refused        {part['refused_because']}")
        return
    tokens, kept = part["prompt_tokens"], part["kept_prompt_tokens"]
    cut = "" if tokens == kept else f", cut to {kept}"
    say(f"  prompt         {UNKNOWN if tokens is None else f'{tokens} tokens{cut}'}")
    longest = part["max_completion_tokens"]
    each = UNKNOWN if longest is None else f"{longest} tokens at most"
    say(f"  completions    {part['completions']}, each {each}")
    say(f"  context        {part['max_model_len']} tokens")
    if part["default_sampling"]:
        found = ", ".join(f"{name} {value:g}" for name, value in part["default_sampling"].items())
        say(f"  its sampling   {found}")


def _show_parameters(parameters: Mapping[str, Any]) -> None:
    """What was sent and what the model or the dialect fills in first; everybody's defaults in one line."""
    rows = [
        (name, _written(each["value"]), origin)
        for origin in ("body", "model", "dialect")
        for name, each in parameters.items()
        if each["from"] == origin
    ]
    if rows:
        console().print(table(("parameter", "value", "from"), rows))
    usual = sum(each["from"] == "default" for each in parameters.values())
    say(f"{usual} others have their usual values; --json lists them.")


def _written(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


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
