"""The commands that send a prompt: complete it, compare models by it, explain what its request would do."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.offering import SWITCH, URL, AsJson, Dialect, HelpAll, Key, Model, Set, Stream, Url, service, streams
from serve_app.cli.parameters import parameters_of
from serve_app.cli.screen import (
    CommandFailed,
    Exit,
    common_length,
    console,
    is_watched,
    remark,
    say,
    say_json,
    table,
    visible,
    whole_lines,
    write,
)

if TYPE_CHECKING:
    from rich.table import Table

PATH, EXPLAINED_PATH = "/v1/completions", "/v1/explain"
MAX_MODELS = 16
"""Of one request."""
LEAST_WIDTH = 24
"""Of a column; narrower ones stand below each other."""
ALIKE = "dim"
UNKNOWN = "unknown until it is computed"
PIPE = "-"


def complete(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="What is completed; - and a pipe are read.")] = None,
    model: Model = None,
    stream: Stream = None,
    set_: Set = None,
    url: Url = URL,
    key: Key = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> int:
    """Complete a prompt, with any parameter of the service."""
    parameters = parameters_of(context, set_, kind="CompletionRequest")
    asked, text = service(url, key, dialect), read_prompt(prompt)
    body = {**parameters, "model": asked.default_model(model), "prompt": text}
    has_one_choice = parameters.get("n", 1) == parameters.get("best_of", 1) == 1
    if streams(stream, as_json=as_json) and has_one_choice:
        with whole_lines():
            for event in asked.events(PATH, body):
                write("".join(choice["text"] for choice in event["choices"]))
        return Exit.DONE
    answer = asked.json(PATH, body, member="choices")
    if as_json:
        say_json(answer)
        return Exit.DONE
    for choice in answer["choices"]:
        if len(answer["choices"]) > 1:
            remark(f"[{choice['index']}] {choice['finish_reason']}")
        say(choice["text"])
    return Exit.DONE


def compare(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="What each of them completes; - and a pipe are read.")] = None,
    models: Annotated[
        str | None, typer.Option("--models", "-m", help="Separated by commas. Usually all that are served.")
    ] = None,
    set_: Set = None,
    url: Url = URL,
    key: Key = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> int:
    """Complete a prompt by several models or adapters, side by side."""
    parameters = parameters_of(context, set_, kind="CompletionRequest")
    asked, text = service(url, key, dialect), read_prompt(prompt)
    if models is None:
        names = [str(each["id"]) for each in asked.models()][:MAX_MODELS]
    else:
        names = list(filter(None, models.split(",")))
    if len(names) < 2:
        found = f"there is {names[0]} alone" if names else "there is none"
        raise CommandFailed(f"A comparison takes two models or more, as in --models demo,demo:pirate; {found}.")
    answer = asked.json(PATH, {**parameters, "model": names, "prompt": text}, member="choices")
    if as_json:
        say_json(answer)
        return Exit.DONE
    num_each = len(answer["choices"]) // len(names)
    texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    for sample in range(num_each):
        _show_compared(names, texts[sample::num_each])
    return Exit.DONE


def explain(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="Of the request; - and a pipe are read.")] = None,
    model: Model = None,
    is_chat: Annotated[bool, typer.Option("--chat", metavar=SWITCH, help="The prompt is a message of a chat.")] = False,
    set_: Set = None,
    url: Url = URL,
    key: Key = None,
    dialect: Dialect = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> int:
    """Say what a request would do: its tokens, models, defaults, limits and cost. Nothing runs."""
    parameters = parameters_of(context, set_, kind="ChatRequest" if is_chat else "CompletionRequest")
    asked, text = service(url, key, dialect), read_prompt(prompt)
    sent: dict[str, object] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    told = asked.json(EXPLAINED_PATH, {**parameters, "model": asked.default_model(model), **sent}, member="parts")
    if as_json:
        say_json(told)
    else:
        show_explanation(told)
    return Exit.REFUSED if any(part["refused_because"] for part in told["parts"]) else Exit.DONE


def read_prompt(argument: str | None) -> str:
    """Return the argument, or all of stdin. Raises CommandFailed where there is neither."""
    found = read_message(argument)
    if found is None:
        raise CommandFailed("There is no prompt: write one behind the command, or pipe one in.", Exit.MISUSED)
    return found


def read_message(argument: str | None) -> str | None:
    """Return the argument, or all of stdin without its last line break; None where a person sits at it."""
    if argument not in (None, PIPE):
        return argument
    if argument is None and sys.stdin.isatty():
        return None
    return sys.stdin.read().removesuffix("\n")


def _show_compared(names: Sequence[str], texts: Sequence[str]) -> None:
    """Show texts in columns where these are wide enough and somebody looks, otherwise one below the other."""
    terminal = console()
    if is_watched() and terminal.width // len(names) >= LEAST_WIDTH:
        terminal.print(_table(names, [visible(text) for text in texts]))
        return
    for name, text in zip(names, texts, strict=True):
        say(f"── {name}\n{text.strip()}\n")


def _table(names: Sequence[str], texts: Sequence[str]) -> Table:
    """Return the texts in columns; what all have alike at their beginning is dim."""
    from rich.table import Table
    from rich.text import Text

    num_alike = common_length(texts)
    table = Table(expand=True)
    for name in names:
        table.add_column(Text(name), ratio=1, overflow="fold")
    table.add_row(*(Text.assemble((text[:num_alike], ALIKE), text[num_alike:]) for text in texts))
    return table


def show_explanation(told: Mapping[str, Any]) -> None:
    """Show what the service says of a request."""
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
    """Show what was sent and what the model or the dialect fills in; other defaults are counted in one line."""
    rows = [
        (name, value if isinstance(value := each["value"], str) else repr(value), origin)
        for origin in ("body", "model", "dialect")
        for name, each in parameters.items()
        if each["from"] == origin
    ]
    if rows:
        console().print(table(("parameter", "value", "from"), rows))
    usual = sum(each["from"] == "default" for each in parameters.values())
    say(f"{usual} others have their usual values; --json lists them.")
