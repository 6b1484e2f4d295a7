"""Tools and the choice among them: what they are read as, and what is refused with the place where it is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.core.errors import InvalidRequest
from serve_app.core.tools import ToolChoice, Tools
from tests.parsing import parse_completion

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: object = "f", **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def parsed(**parameters: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "tiny", "prompt": "Hello", **parameters}).encode())


def refusal(**parameters: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**parameters)
    return caught.value.param, caught.value.message


def test_tools_are_read_with_all_that_is_said_of_them() -> None:
    sent = [tool("f", description="Finds.", parameters=SCHEMA, strict=True), tool("g", strict=None, parameters=None)]
    first, second = parsed(tools=sent).tools
    assert (first.name, first.at, first.description, first.is_strict) == ("f", 0, "Finds.", True)
    assert (first.parameters, first.sent) == (SCHEMA, sent[0])
    assert (second.name, second.at, second.description, second.is_strict) == ("g", 1, "", False)
    assert second.parameters is None


@pytest.mark.parametrize(
    ("choice", "mode", "usable"),
    [
        (None, "auto", "fg"),
        ("none", "none", ""),
        ("auto", "auto", "fg"),
        ("required", "required", "fg"),
        (named("g"), "required", "g"),
        (allowed("auto", "g", "f"), "auto", "fg"),
        (allowed("required", "g"), "required", "g"),
    ],
)
def test_a_choice_says_whether_and_which(choice: object, mode: str, usable: str) -> None:
    use = parsed(tools=[tool("f"), tool("g")], tool_choice=choice).tool_use
    assert (use.choice.mode, "".join(each.name for each in use.usable)) == (mode, usable)
    assert not use.is_parallel


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_without_tools_there_is_nothing_to_do(choice: object) -> None:
    for tools in (None, []):
        assert parsed(tools=tools, tool_choice=choice).tool_use == Tools()
    assert Tools().usable == ()
    assert Tools().choice == ToolChoice(mode="none")


def test_several_calls_are_only_taken_where_they_were_asked_for() -> None:
    assert parsed(tools=[tool()], parallel_tool_calls=True).tool_use.is_parallel
    assert not parsed(tools=[tool()], parallel_tool_calls=False).tool_use.is_parallel


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ({}, "tools"),
        ([tool(str(at)) for at in range(129)], "tools"),
        ([tool(description="x" * 300_000)], "tools"),
        (["f"], "tools[0]"),
        ([tool(), {"type": "custom"}], "tools[1]"),
        ([tool(), {"type": "function"}], "tools[1]"),
        ([{"function": {"name": "f"}}], "tools[0]"),
        ([{"type": "function", "function": {}}], "tools[0]"),
        ([tool(5)], "tools[0]"),
        ([tool("")], "tools[0].function.name"),
        ([tool("two words")], "tools[0].function.name"),
        ([tool("x" * 129)], "tools[0].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool("f"), tool("g"), tool("f")], "tools[2].function.name"),
        ([tool(description=5)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters="{}")], "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], "tools[0].function.parameters"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_what_is_no_tool_is_refused_with_its_place_whether_it_is_used_or_not(
    tools: object, param: str, choice: str
) -> None:
    found, message = refusal(tools=tools, tool_choice=choice)
    assert found == param
    assert message.startswith(f'"{param}" must be ')


@pytest.mark.parametrize(
    "choice",
    ["any", 5, True, [], {}, {"type": "function"}, {"type": "function", "function": {"name": 5}}, allowed("none", "f"),
     allowed("auto"), {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}}],
)  # fmt: skip
def test_what_is_no_choice_is_refused(choice: object) -> None:
    param, message = refusal(tools=[tool()], tool_choice=choice)
    assert param == "tool_choice"
    assert message.startswith('"tool_choice" must be "none" or "auto" or "required", or ')


@pytest.mark.parametrize("choice", ["required", named("f"), allowed("auto", "f")])
@pytest.mark.parametrize("tools", [None, []])
def test_there_is_nothing_to_call_without_tools(choice: object, tools: object) -> None:
    param, message = refusal(tools=tools, tool_choice=choice)
    assert (param, message.split(";")[0]) == ("tool_choice", '"tool_choice" must be "none" or "auto" without "tools"')


def test_a_function_that_there_is_not_is_refused_by_its_name() -> None:
    for choice in (named("h"), allowed("auto", "f", "h")):
        assert refusal(tools=[tool("f")], tool_choice=choice) == (
            "tool_choice",
            '"tool_choice" must name functions of "tools"; found "h".',
        )


@pytest.mark.parametrize("dialect_choice", ["required", named("f")])
def test_a_text_that_has_to_be_a_call_is_nothing_else(dialect_choice: object) -> None:
    param, message = refusal(tools=[tool()], tool_choice=dialect_choice, response_format={"type": "json_object"})
    assert param == "tool_choice"
    assert 'beside "response_format"' in message


@pytest.mark.parametrize(
    "neutral",
    [{"response_format": {"type": "text"}}, {"grammar": ""}, {"regex": ""}, {"json_schema": None}, {"ebnf": ""}],
)
def test_what_leaves_the_text_free_stands_beside_a_call(neutral: dict[str, Any]) -> None:
    assert parsed(tools=[tool()], tool_choice="required", **neutral).tool_use.names == {"f"}


def test_tools_that_are_not_demanded_stand_beside_a_constraint() -> None:
    for choice in (None, "none", "auto"):
        request = parsed(tools=[tool()], tool_choice=choice, regex="a+")
        assert request.constraint is not None
        assert request.constraint.kind == "regex"


def test_a_strict_tool_does_not_stand_beside_a_grammar_that_is_no_part_of_another() -> None:
    lark = {"type": "lark", "value": 'start: "a"'}
    assert parsed(tools=[tool(), tool("g", strict=True)], grammar=lark, tool_choice="none").constraint is not None
    param, message = refusal(tools=[tool(), tool("g", strict=True)], grammar=lark)
    assert param == "tools[1].function.strict"
    assert 'beside "grammar"' in message
