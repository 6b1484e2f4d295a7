"""Tools on completions, from bytes to bytes with the real engine: calls in texts, in bodies and in streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from serve_app.api.dialects import DIALECTS
from tests.flow.stack import Stack, running_stack

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


STRICT = tool("get_weather", description="Forecasts.", parameters=WEATHER, strict=True)
NOW = tool("now", strict=True)
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1) as running:
        yield running


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


async def refusal_of(stack: Stack, dialect: str = "union", **body: Any) -> tuple[int, str]:
    response = await stack.post({"model": "demo", "prompt": "Once", **body}, dialect=dialect)
    answer = response.json()
    return response.status_code, answer.get("error", answer)["message"]


def check_call(choice: dict[str, Any], name: str = "get_weather", schema: dict[str, Any] = WEATHER) -> None:
    """The text is the call, and the call is told beside it."""
    written = json.loads(choice["text"])
    (call,) = choice["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert set(call) == {"id", "type", "function"}
    assert (call["type"], call["function"]["name"], written["name"]) == ("function", name, name)
    assert json.loads(call["function"]["arguments"]) == written["arguments"]
    jsonschema.validate(written["arguments"], schema)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_named_function_is_called_in_every_dialect(stack: Stack, dialect: str) -> None:
    body = {
        "model": "demo",
        "prompt": "Once",
        "tools": [NOW, STRICT],
        "tool_choice": NAMED,
        "max_tokens": 80,
        "seed": 5,
    }
    response = await stack.post(body, dialect=dialect)
    assert response.status_code == 200, response.text
    check_call(response.json()["choices"][0])


async def test_required_calls_one_of_the_functions(stack: Stack) -> None:
    names = set()
    for seed in range(40):
        if len(names) == 2:
            break
        body = {"tools": [STRICT, NOW], "tool_choice": "required", "max_tokens": 80, "temperature": 1.5, "seed": seed}
        choice = (await stack.complete(prompt="Once", **body))["choices"][0]
        name = choice["tool_calls"][0]["function"]["name"]
        check_call(choice, name, WEATHER if name == "get_weather" else {"maxProperties": 0})
        names.add(name)
    assert names == {"get_weather", "now"}


async def test_what_is_not_strict_has_any_object_for_arguments(stack: Stack) -> None:
    loose = tool("get_weather", parameters=WEATHER)
    body = {"tools": [loose], "tool_choice": "required", "max_tokens": 60, "temperature": 1, "n": 6, "seed": 2}
    choices = (await stack.complete(prompt="Once", **body))["choices"]
    assert all(choice["text"].startswith('{"name": "get_weather", "arguments": {') for choice in choices)
    for choice in choices:
        if choice["finish_reason"] == "tool_calls":
            check_call(choice, schema={"type": "object"})
        else:
            assert (choice["finish_reason"], "tool_calls" in choice) == ("length", False)


async def test_several_prompts_and_choices_have_their_own_calls(stack: Stack) -> None:
    body = {"tools": [STRICT], "tool_choice": "required", "max_tokens": 80, "temperature": 1, "seed": 3, "echo": True}
    response = await stack.complete(prompt=["Once", '{"name": "now", "arguments": {}}'], n=2, **body)
    ids = [call["id"] for choice in response["choices"] for call in choice["tool_calls"]]
    assert len(set(ids)) == 4
    for choice, prompt in zip(
        response["choices"], ["Once"] * 2 + ['{"name": "now", "arguments": {}}'] * 2, strict=True
    ):
        assert choice["text"].startswith(prompt)
        check_call({**choice, "text": choice["text"].removeprefix(prompt)})


async def test_a_list_of_calls_where_they_are_parallel(stack: Stack) -> None:
    body = {"tools": [NOW], "tool_choice": "required", "parallel_tool_calls": True, "temperature": 1, "max_tokens": 120}
    counts = set()
    for seed in range(6):
        choice = (await stack.complete(prompt="Once", seed=seed, **body))["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            counts.add(len(choice["tool_calls"]))
            assert [each["name"] for each in json.loads(choice["text"])] == ["now"] * len(choice["tool_calls"])
    assert max(counts) >= 1


async def test_a_stream_gives_text_and_the_calls_whole_at_its_end(stack: Stack) -> None:
    body = {"prompt": "Once", "tools": [STRICT, NOW], "tool_choice": NAMED, "max_tokens": 80, "n": 2, "seed": 4}
    whole = (await stack.complete(**body))["choices"]
    chunks = [chunk["choices"][0] for chunk in await stack.stream(**body)]
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert [chunk["finish_reason"] for chunk in mine] == [None] * (len(mine) - 1) + ["tool_calls"]
        assert not any("tool_calls" in chunk for chunk in mine[:-1])
        (streamed,), (told,) = mine[-1]["tool_calls"], choice["tool_calls"]
        assert streamed["function"] == told["function"]
    assert len(chunks) > 4


async def test_the_best_of_several_keeps_its_calls(stack: Stack) -> None:
    body = {"tools": [STRICT], "tool_choice": "required", "max_tokens": 200, "temperature": 1, "seed": 1, "best_of": 3}
    for choice in (await stack.complete(prompt="Once", n=2, **body))["choices"]:
        check_call(choice)


async def test_tools_that_may_be_called_leave_the_text_alone(stack: Stack) -> None:
    plain = (await stack.complete(prompt="Once upon a time", max_tokens=12))["choices"]
    for members in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        response = await stack.complete(prompt="Once upon a time", max_tokens=12, tools=[tool("f")], **members)
        assert response["choices"] == plain


async def test_strict_tools_leave_text_alone_that_is_no_call(stack: Stack) -> None:
    plain = (await stack.complete(prompt="Once upon a time", max_tokens=12))["choices"]
    for members in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}):
        held = await stack.complete(prompt="Once upon a time", max_tokens=12, tools=[STRICT], **members)
        assert held["choices"] == plain


async def test_a_call_beside_a_schema_is_either(stack: Stack) -> None:
    body = {
        "tools": [STRICT],
        "response_format": {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 9}},
    }
    for seed in range(4):
        choice = (await stack.complete(prompt="Once", seed=seed, temperature=1, max_tokens=80, **body))["choices"][0]
        if "tool_calls" in choice:
            check_call(choice)
        elif choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), {"type": "integer", "maximum": 9})


async def test_llama_cpp_has_the_call_in_its_content(stack: Stack) -> None:
    body = {"model": "demo", "prompt": "Once", "tools": [STRICT], "tool_choice": "required", "n_predict": 80}
    result = (await stack.post(body, "/completion")).json()
    assert json.loads(result["content"])["name"] == "get_weather"
    assert result["stop_type"] == "eos"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_cannot_be_enforced_is_refused_before_anything_is_sent(stack: Stack, stream: bool) -> None:
    bad = tool("f", parameters={"type": "object", "properties": {"a": {"contains": {}}}}, strict=True)
    for members in ({"tool_choice": "required"}, {"tool_choice": "auto"}):
        status, message = await refusal_of(stack, tools=[NOW, bad], stream=stream, **members)
        assert status == 400
        assert 'found this at #/1/function/parameters/properties/a: "contains" cannot be enforced' in message
    assert (
        await stack.post({"model": "demo", "prompt": "Once", "tools": [bad], "tool_choice": "none"})
    ).status_code == 200


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_demanded_call_contradicts_every_other_constraint(stack: Stack, dialect: str) -> None:
    for other in ({"regex": "a"}, {"grammar": "root ::= 'a'"}, {"response_format": {"type": "json_object"}}):
        status, message = await refusal_of(stack, dialect, tools=[NOW], tool_choice="required", **other)
        assert status == (422 if dialect == "mistral.rs" else 400)
        assert f'beside "{next(iter(other))}"' in message
