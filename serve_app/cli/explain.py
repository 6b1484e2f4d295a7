"""Tells what a request would do, as the service explains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.cli.client import Service
from serve_app.cli.exits import Exit
from serve_app.cli.screen import console, say, say_json, table

PATH = "/v1/explain"
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
    told = service.json(PATH, body, member="parts")
    if as_json:
        say_json(told)
    else:
        _show(told)
    return Exit.REFUSED if any(part["refused_because"] for part in told["parts"]) else Exit.DONE


def _show(told: Mapping[str, Any]) -> None:
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
