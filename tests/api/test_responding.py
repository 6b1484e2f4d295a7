"""POST /v1/responses: what its body becomes as a chat, what is refused, and the events that an answer comes in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from typing import Any

import pytest

from serve_app.api.dialects import DIALECTS, UNION
from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.api.responding import ResponsesRequest, read_responses
from serve_app.api.response_items import ResponseWriter
from serve_app.api.responses import ChatChoice, ResponseHead
from serve_app.core.delta import FinishReason, Usage
from serve_app.core.errors import InvalidRequest, ReplicaLost
from serve_app.core.tools import ToolCallDelta

HEAD = ResponseHead(id="resp-1", created=7, model="tiny")
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


def read(dialect: str = "union", **members: Any) -> ResponsesRequest:
    return read_responses({"model": "tiny", "input": "hi", **members}, DEFAULT_LIMITS, DIALECTS[dialect])


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": "look", "arguments": arguments}


def said(text: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": parts}


def test_a_text_is_the_users_behind_the_instructions() -> None:
    request = read(instructions="Be brief.")
    assert [(each["role"], each["content"]) for each in request.messages] == [("system", "Be brief."), ("user", "hi")]
    assert request.max_tokens == -1


def test_what_a_model_gave_in_a_row_is_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        said("I look."),
        call("a", '{"at": 1}'),
        call("b"),
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "So."}]},
        said("Done."),
        said("Really."),
        {"role": "developer", "content": "Go on."},
    ]
    messages = read(input=items).messages
    assert [each["role"] for each in messages] == [
        "user", "assistant", "tool", "tool", "assistant", "assistant", "developer",
    ]  # fmt: skip
    first, last = messages[1], messages[4]
    assert (first["reasoning_content"], len(first["tool_calls"])) == ("Hm.", 2)
    assert [each["id"] for each in first["tool_calls"]] == ["a", "b"]
    assert messages[2]["tool_call_id"] == "a"
    assert last["reasoning_content"] == "So."


def test_the_other_names_are_those_of_chats() -> None:
    request = read(
        max_output_tokens=9, reasoning={"effort": "low", "summary": "auto"}, truncation="auto", tools=[LOOK],
        tool_choice={"type": "function", "name": "look"}, parallel_tool_calls=True, top_logprobs=2, store=True,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"], temperature=0.5, user="u",
        text={"format": {"type": "text"}, "verbosity": "low"},
    )  # fmt: skip
    assert (request.max_tokens, request.reasoning_effort, request.truncate_sequence) == (9, "low", True)
    assert (request.tools[0].name, request.tools[0].is_strict) == ("look", True)
    assert (request.tool_use.choice.mode, request.tool_use.choice.names) == ("required", ("look",))
    assert (request.logprobs, request.user) == (2, "u")
    assert set(request.ignored_parameters) == {
        "include.reasoning.encrypted_content", "reasoning.summary", "store", "text.verbosity",
    }  # fmt: skip
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    held = read(text={"format": schema}).constraint
    assert held is not None
    assert held.kind == "json_schema"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
    assert read(tools=[LOOK], tool_choice=allowed).tool_use.choice.names == ("look",)


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_hints_are_taken_in_every_dialect(dialect: str) -> None:
    hints = {"metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "flex"}
    assert set(read(dialect, **hints, store=False).ignored_parameters) == set(hints)


@pytest.mark.parametrize(
    ("members", "param", "way_out"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", 'Send the whole conversation as "input"'),
        ({"conversation": {"id": "c"}}, "conversation", 'Send the whole conversation as "input"'),
        ({"background": True}, "background", 'Send "stream": true'),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"tools": [LOOK, {"type": "web_search"}]}, "tools[1].type", "Describe it as a function"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0].type", "Send the whole conversation"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "as text"),
        (
            {"input": [{"role": "user", "content": [{"type": ["input_text"]}]}]},
            "input[0].content[0]",
            '"type" is "text"',
        ),
        ({"input": [{"type": "reasoning", "content": 1.5}]}, "input[0].content", "a list of texts"),
        ({"input": [{"type": "reasoning", "summary": ["hm"]}]}, "input[0].summary", "a list of texts"),
        ({"input": [{"type": "reasoning", "summary": [{"text": {}}]}]}, "input[0].summary", "a list of texts"),
        ({"input": None}, "input", "a string, or a list of items"),
        ({"input": []}, "input", "a string, or a list of items"),
        ({"input": ["a"], "instructions": "b"}, "input[0]", "a message, a function call"),
        ({"max_output_tokens": -5}, "max_output_tokens", "an integer from"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", '"low"'),
        ({"text": {"format": {"type": "odd"}}}, "text.format", '"json_schema"'),
        ({"tool_choice": "required"}, "tool_choice", '"none" or "auto" without "tools"'),
        ({"tools": [LOOK], "tool_choice": {"type": "mcp"}}, "tool_choice", '"allowed_tools"'),
        ({"truncation": "maybe"}, "truncation", '"disabled"'),
        ({"n": 2}, "n", "as often as answers are wanted"),
        ({"model": ["tiny", "tiny"]}, "model", "one name"),
        ({"include": [5]}, "include[0]", "a string"),
    ],
)
def test_what_is_refused_is_named_with_the_way_out(members: dict[str, Any], param: str, way_out: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**members)
    assert (caught.value.param, way_out in caught.value.message) == (param, True), caught.value.message


def written(*choices: ChatChoice, **members: Any) -> list[dict[str, Any]]:
    """The events of an answer that comes in these pieces, a token each."""
    writer = ResponseWriter(read(**members), HEAD)
    events = [*writer.begin()]
    for at, choice in enumerate(choices, 1):
        events += writer.add(choice, at)
    return [*events, *writer.end(Usage(prompt_tokens=3, completion_tokens=len(choices), cached_tokens=1))]


def piece(**members: Any) -> ChatChoice:
    return ChatChoice(index=0, **members)


def test_thoughts_text_and_calls_are_items_in_the_order_in_which_they_come() -> None:
    events = written(
        piece(role="assistant"),
        piece(reasoning="Hm"),
        piece(reasoning="."),
        piece(content="I "),
        piece(content="look."),
        piece(tool_calls=(ToolCallDelta(index=0, id="a", name="look", arguments='{"x"'),)),
        piece(tool_calls=(ToolCallDelta(index=0, arguments=": 1}"), ToolCallDelta(index=1, id="b", name="look"))),
        piece(finish_reason=FinishReason.TOOL_CALLS),
        tools=[LOOK],
    )
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert response["output"][2]["arguments"] == '{"x": 1}'
    assert response["usage"] == {
        "input_tokens": 3, "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 8, "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 11,
    }  # fmt: skip
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    assert all(count == 1 for count in Counter(item["id"] for item in response["output"]).values())


WHOLE: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        said("I look."),
        call("a"),
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "rain"}]},
    ],
    "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "schema": {}}},
    "tools": [LOOK],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
}


def variants(value: Any, odd: object) -> Iterator[Any]:
    """The value with something odd in the place of each of its parts, one at a time."""
    yield odd
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for each in variants(value[key], odd):
            changed = copy(value)
            changed[key] = each
            yield changed


@pytest.mark.parametrize("odd", [None, True, 7, 1.5, "", "x", [], ["x"], [[]], {}, {"type": []}, {"type": "text"}])
def test_whatever_stands_anywhere_is_read_or_refused(odd: object) -> None:
    for members in variants(WHOLE, odd):
        if isinstance(members, dict):
            with suppress(InvalidRequest):
                read(**members)


@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        (FinishReason.STOP, "completed", None),
        (FinishReason.LENGTH, "incomplete", {"reason": "max_output_tokens"}),
        (FinishReason.CONTENT_FILTER, "incomplete", {"reason": "content_filter"}),
    ],
)
@pytest.mark.parametrize("text", ["", "So"])
def test_the_end_is_told_by_its_status(finish: FinishReason, status: str, reason: object, text: str) -> None:
    end = written(piece(content=text), piece(finish_reason=finish))[-1]
    response = end["response"]
    assert (end["type"], response["status"], response["incomplete_details"]) == (f"response.{status}", status, reason)
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == (status, text)


def test_a_response_that_fails_says_so_and_tells_the_request_again() -> None:
    writer = ResponseWriter(read(metadata={"a": "b"}, temperature=0.5, tools=[LOOK]), HEAD)
    begun = [*writer.begin(), *writer.add(piece(content="So"), 1)]
    failed = writer.failed(ReplicaLost("gone"))
    response = failed["response"]
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", len(begun))
    assert (response["status"], response["error"]["code"], response["error"]["message"]) == (
        "failed", "replica_lost", "gone",
    )  # fmt: skip
    assert (response["metadata"], response["temperature"], response["tools"]) == ({"a": "b"}, 0.5, [LOOK])
    assert (UNION.name, response["store"], response["previous_response_id"]) == ("union", False, None)
