"""What a chat's body may hold, and what of completions' it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.api.chat import CHAT_PARAMETERS, ChatRequest
from serve_app.api.dialects import DIALECTS, UNION, Dialect
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.parse import CHAT
from serve_app.core.cards import ModelCard
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from tests.parsing import parse_request

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "é"}'}}


def parsed(dialect: Dialect = UNION, limits: WireLimits = DEFAULT_LIMITS, **members: Any) -> ChatRequest:
    body = json.dumps({"model": "tiny", "messages": [USER], **members}).encode()
    return parse_request(CHAT, body, limits, lambda model: dialect)


def refusal(**members: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**members)
    return caught.value


def card(template: str = "", **members: Any) -> ModelCard:
    return ModelCard(
        name="tiny", root="", created=0, max_model_len=64, vocab_size=64, chat_template=template, **members
    )


def variables(request: ChatRequest, template: str = "") -> dict[str, Any]:
    conversation = request.conversation(card(template))
    found: dict[str, Any] = json.loads(conversation.source)
    return found


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (USER, USER),
        ({**USER, "name": "ann", "odd": 1, "tool_calls": None}, {**USER, "name": "ann", "odd": 1}),
        ({"role": "system", "content": [{"type": "text", "text": "a", "odd": 1}, {"type": "refusal", "refusal": "b"}]},
         {"role": "system", "content": [{"type": "text", "text": "a", "odd": 1}, {"type": "text", "text": "b"}]}),
        ({"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
         {"role": "assistant", "content": None, "tool_calls": [CALL]}),
        ({"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": []},
         {"role": "assistant", "content": "x", "reasoning_content": "y"}),
        ({"role": "assistant", "content": None, "reasoning": "y", "tool_calls": None},
         {"role": "assistant", "content": None, "reasoning": "y"}),
        ({"role": "assistant", "thinking": "y"}, {"role": "assistant", "thinking": "y"}),
        ({"role": "critic", "verdict": {"a": [1]}}, {"role": "critic", "verdict": {"a": [1]}}),
        ({"role": "critic", "content": None}, {"role": "critic", "content": None}),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "a"}]},
         {"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}),
        ({"role": "tool", "content": "5", "tool_call_id": "c1"},
         {"role": "tool", "content": "5", "tool_call_id": "c1"}),
    ],
)  # fmt: skip
def test_a_message_is_read_as_it_was_sent(sent: dict[str, Any], read: dict[str, Any]) -> None:
    assert parsed(messages=[sent]).messages == (read,)


@pytest.mark.parametrize(
    ("messages", "param", "found"),
    [
        ([], "messages", "a list of 1 to 4096 messages"),
        ("Hello", "messages", "a list of 1 to 4096 messages"),
        ([USER] * 4097, "messages", "found 4097 elements"),
        ([USER, {"role": "", "content": "x"}], "messages[1]", "system, developer, user, assistant, tool or one"),
        ([USER, {"role": 5, "content": "x"}], "messages[1]", 'an object with a "role"'),
        ([{"role": "assistant", "reasoning": 5}], "messages[0].reasoning", "a string; found 5"),
        ([{"role": "user"}], "messages[0].content", "a string or a list of parts; found null"),
        ([{"role": "user", "content": None}], "messages[0].content", "a string or a list of parts; found null"),
        ([{"role": "assistant"}], "messages[0].content", "a string or a list of parts; found null"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "a string; found null"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]", 'whose "type" is "text"'),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content", "found null"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
         "messages[0].tool_calls[0].function.arguments", "JSON of one in a string"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}],
         "messages[0].tool_calls[0].function.name", "a non-empty string"),
        ([{"role": "tool", "content": "5", "tool_call_id": 5}], "messages[0].tool_call_id", "a string; found 5"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused_by_its_place(messages: object, param: str, found: str) -> None:
    error = refusal(messages=messages)
    assert error.param == param
    assert found in str(error)


@pytest.mark.parametrize("kind", ["image", "input_audio", "file"])
def test_what_is_no_text_is_refused_by_name(kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:image/png;base64,AA=="}}
    error = refusal(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert isinstance(error, UnsupportedParameter)
    assert error.param == "messages[0].content[1].type"


def test_messages_are_bounded_as_a_prompt_is() -> None:
    with pytest.raises(InvalidRequest, match="at most 8 characters"):
        parsed(limits=WireLimits(max_prompt_chars=8))


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt", "a"), ("echo", True), ("echo_last", 1), ("best_of", 2), ("suffix", "a"), ("n_probs", 1)],
)
def test_what_is_of_completions_alone_is_refused_by_name(name: str, value: object) -> None:
    assert refusal(**{name: value}).param == name


@pytest.mark.parametrize(
    ("sent", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_log_probabilities_are_switched_on_and_counted_apart(sent: dict[str, Any], logprobs: int | None) -> None:
    assert parsed(**sent).logprobs == logprobs


@pytest.mark.parametrize("sent", [{"logprobs": 5}, {"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}])
def test_log_probabilities_beyond_that_are_refused(sent: dict[str, Any]) -> None:
    assert "logprobs" in str(refusal(**sent).param)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_an_answer_is_as_long_as_it_gets_where_nothing_is_said(dialect: Dialect) -> None:
    assert parsed(dialect).max_tokens == (32768 if dialect.name == "omlx" else -1)
    assert parsed(dialect, max_completion_tokens=5).max_tokens == 5


def test_the_template_is_given_what_was_sent_and_nothing_may_take_its_place() -> None:
    given = variables(parsed(chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False))
    assert given == {"enable_thinking": False, "messages": [USER], "add_generation_prompt": False}
    for name in ("messages", "tools", "add_generation_prompt"):
        assert refusal(chat_template_kwargs={name: None}).param == "chat_template_kwargs"


def test_an_effort_and_documents_are_variables_of_the_template() -> None:
    documents = [{"title": "a", "text": "b"}]
    given = variables(parsed(reasoning_effort="low", documents=documents))
    assert (given["reasoning_effort"], given["enable_thinking"], given["documents"]) == ("low", True, documents)
    assert variables(parsed(reasoning_effort="none"))["enable_thinking"] is False
    chosen = {"enable_thinking": False, "reasoning_effort": "high"}
    assert (
        variables(parsed(reasoning_effort="low", chat_template_kwargs=chosen)).items()
        >= {
            "enable_thinking": False,
            "reasoning_effort": "low",
        }.items()
    )
    assert (
        not {"reasoning_effort", "enable_thinking", "documents"}
        & variables(parsed(reasoning_effort=None, documents=None)).keys()
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reasoning_effort", "much"), ("reasoning_effort", 3), ("documents", "a"), ("documents", ["a"]),
        ("documents", {"text": "a"}), ("documents", [{"text": "a" * 300_000}]),
    ],
)  # fmt: skip
def test_what_is_no_effort_or_document_is_refused(name: str, value: object) -> None:
    assert refusal(**{name: value}).param == name


def test_a_developer_is_the_system_to_a_template_that_knows_none() -> None:
    request = parsed(messages=[{"role": "developer", "content": "a"}])
    assert variables(request)["messages"][0]["role"] == "system"
    assert variables(request, "{% if role == 'developer' %}")["messages"][0]["role"] == "developer"


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{\n "q"', "null", "[1]", "", '{"a":' * 99, None, {"a": 1}])
def test_a_call_comes_back_as_it_was_written(arguments: object) -> None:
    """What a length cut off was a 400 on our own output: vLLM #43995."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    sent = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert variables(parsed(messages=[USER, sent]))["messages"][1] == sent


def test_a_kind_of_part_that_the_template_does_not_know_is_refused_by_name() -> None:
    request = parsed(messages=[{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}])
    assert variables(request, "{% if part.type == 'thinking' %}")["messages"][0]["content"][0]["thinking"] == "a"
    with pytest.raises(UnsupportedParameter, match='knows, as text; found "thinking"'):
        request.conversation(card("{{ part.text }}"))


def test_tools_are_given_to_their_own_template_or_refused_as_the_model_is_set() -> None:
    request = parsed(tools=[TOOL])
    assert variables(request)["tools"] == [TOOL]
    with pytest.raises(UnsupportedParameter, match=r'"tools" must be absent for tiny.*tools_without_template: prompt'):
        request.conversation(card(tool_prompt="refuse"))
    unused = parsed(tools=[TOOL], tool_choice="none")
    assert "tools" not in json.loads(unused.conversation(card(tool_prompt="refuse")).source)
    two = card("{{ 'system' }}", tool_template="developer")
    developer = [{"role": "developer", "content": "a"}]
    roles = [json.loads(parsed(messages=developer, **more).conversation(two).source)["messages"][0]["role"]
             for more in ({}, {"tools": [TOOL]})]  # fmt: skip
    assert roles == ["system", "developer"]


def test_an_answer_is_gone_on_with_where_it_is_the_last_message() -> None:
    answer = {"role": "assistant", "content": "So"}
    request = parsed(messages=[USER, answer], continue_final_message=True)
    assert request.conversation(card()).continues_last
    assert variables(request)["add_generation_prompt"] is False
    assert refusal(continue_final_message=True).param == "messages"
    calls = {**answer, "tool_calls": [CALL]}
    assert refusal(continue_final_message=True, messages=[USER, calls]).param == "messages"
    both = refusal(continue_final_message=True, add_generation_prompt=True, messages=[USER, answer])
    assert both.param == "continue_final_message"


def test_thoughts_are_told_apart_where_it_is_wanted() -> None:
    assert parsed().splits_reasoning
    assert not parsed(separate_reasoning=False).splits_reasoning


@pytest.mark.parametrize(
    ("sent", "is_parallel"),
    [
        ({}, True),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
        ({"tool_choice": "required", "parallel_tool_calls": True}, True),
        ({"parallel_tool_calls": False}, False),
    ],
)
def test_several_calls_may_be_made_unless_one_is_demanded(sent: dict[str, Any], *, is_parallel: bool) -> None:
    request = parsed(tools=[{"type": "function", "function": {"name": "f"}}], **sent)
    assert request.tool_use.is_parallel is is_parallel


def test_every_parameter_of_sampling_and_stopping_is_one_of_chats() -> None:
    for name in ("temperature", "top_k", "stop", "stop_regex", "response_format", "grammar", "logit_bias", "dry_base"):
        assert name in CHAT_PARAMETERS
