"""Tools of completions: what they demand of a text, and when a text that ended is calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.api.responses import Choice
from serve_app.core.delta import FinishReason
from serve_app.router.message import CallReader, constraint_of
from tests.parsing import parse_completion

CALL = '{"name": "f", "arguments": {"a": 1}}'


def tool(name: str = "f", **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def request_of(**members: object) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "tiny", "prompt": "Hello", **members}).encode())


def ended(
    pieces: list[str], reason: FinishReason = FinishReason.STOP, **members: object
) -> tuple[FinishReason | None, list[tuple[str, str]]]:
    """How a choice whose text came in these pieces ends, and its calls."""
    reader = CallReader(request_of(**({"tools": [tool()]} | members)).tool_use)
    for piece in pieces:
        reader.note(3, piece)
    choice = reader.finished(Choice(index=3, text=pieces[-1], finish_reason=reason))
    assert choice.text == pieces[-1]
    return choice.finish_reason, [(call.name, call.arguments) for call in choice.tool_calls]


def test_a_text_that_is_a_call_ends_as_one_however_it_came() -> None:
    for pieces in ([CALL], list(CALL), [f" {CALL}\n"], [""], ["text", CALL]):
        is_call = "".join(pieces).strip() == CALL
        expected = (FinishReason.TOOL_CALLS, [("f", '{"a": 1}')]) if is_call else (FinishReason.STOP, [])
        assert ended(pieces) == expected


def test_a_list_is_several_calls() -> None:
    assert ended([f"[{CALL}, {CALL}]"])[1] == [("f", '{"a": 1}')] * 2


@pytest.mark.parametrize("text", ["text", CALL + " and", CALL[:-1], CALL.replace('"f"', '"g"'), '{"a": 1}'])
def test_any_other_text_ends_as_it_did(text: str) -> None:
    assert ended([text]) == (FinishReason.STOP, [])


def test_a_call_at_the_limit_is_told_and_ended_by_the_limit() -> None:
    assert ended([CALL], FinishReason.LENGTH) == (FinishReason.LENGTH, [("f", '{"a": 1}')])


def test_tools_that_may_not_be_called_are_not_looked_for() -> None:
    for members in ({"tool_choice": "none"}, {"tools": []}):
        assert ended([CALL], **members) == (FinishReason.STOP, [])
    both: dict[str, Any] = {"tools": [tool("f"), tool("g")]}
    named = {"type": "function", "function": {"name": "g"}}
    assert ended([CALL], **both, tool_choice=named) == (FinishReason.STOP, [])


def test_only_what_is_required_or_strict_demands_anything() -> None:
    assert constraint_of(request_of(tools=[tool()])) is None
    for members in ({"tool_choice": "required"}, {"tools": [tool(strict=True)]}):
        constraint = constraint_of(request_of(**({"tools": [tool()]} | members)))
        assert constraint is not None
        assert (constraint.kind, constraint.name) == ("tools", "tools")
    assert constraint_of(request_of(tools=[tool(strict=True)], tool_choice="none")) is None


def test_a_constraint_stays_what_it_is_beside_tools_that_demand_nothing() -> None:
    alone = constraint_of(request_of(regex="a+"))
    assert alone is not None
    assert constraint_of(request_of(regex="a+", tools=[tool()])) == alone
    combined = constraint_of(request_of(regex="a+", tools=[tool(strict=True)]))
    assert combined is not None
    assert combined.kind == "tools"
