"""Completes a prompt and shows what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.cli.client import Service
from serve_app.cli.exits import Exit
from serve_app.cli.screen import remark, say, say_json, whole_lines, write

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
