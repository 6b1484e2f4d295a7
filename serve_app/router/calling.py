"""Tools of completions: what they demand of a text, and the calls that it turned out to hold.

No template is between prompt and text, so that a call is JSON and nothing else: {"name": …, "arguments": {…}}, or
several in a list.
"""

from __future__ import annotations

import json
from dataclasses import replace

from serve_app.api.completion import CompletionRequest
from serve_app.api.responses import Choice
from serve_app.core.delta import FinishReason
from serve_app.core.request import Constraint
from serve_app.core.tools import Tools
from serve_app.tools.forms import JSON, call_constraint
from serve_app.tools.parser import parse_whole


def constraint_of(request: CompletionRequest) -> Constraint | None:
    """What each text has to be, tools considered; those that may be called and are not strict demand nothing."""
    tools = request.tool_use
    if tools.choice.mode == "required" or any(tool.is_strict for tool in tools.usable):
        return call_constraint(tools, JSON, request.constraint)
    return request.constraint


class CallReader:
    """Reads the calls of each choice's text once it has ended."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools.usable
        self._texts: dict[int, list[str]] = {}

    def note(self, index: int, text: str) -> None:
        """Remember what a choice's text gained."""
        if self._tools:
            self._texts.setdefault(index, []).append(text)

    def finished(self, choice: Choice) -> Choice:
        """The end of a choice, with its calls where its text is nothing else."""
        text = "".join(self._texts.pop(choice.index, ()))
        if not text:
            return choice
        content, calls = parse_whole(JSON, text, self._tools)
        if content or not calls or not _is_json(text):
            return choice
        has_stopped = choice.finish_reason is FinishReason.STOP
        reason = FinishReason.TOOL_CALLS if has_stopped else choice.finish_reason
        return replace(choice, tool_calls=calls, finish_reason=reason)


def _is_json(text: str) -> bool:
    """Calls are also read where the mark or the brace behind them is missing; here the text is to be their JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
