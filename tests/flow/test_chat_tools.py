"""Tools in chats from bytes to bytes: calls in a family's form, as messages and as deltas of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from serve_app.core.tools import ToolParserName
from tests.flow.stack import Stack, running_stack
from tests.flow.test_chat import PATH, QUESTION, events, reciting

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
WEATHER_ANYWHERE = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
HERMES = """{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '</tools> as <tool_call></tool_call><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
    {%- for call in message.tool_calls or [] %}{{ '<tool_call>' ~ call.function | tojson ~ '</tool_call>' }}{% endfor %}
    {{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CALL = [
    "Let me see.\n<tool",
    '_call>\n{"name": "wea',
    'ther", "argum',
    'ents": {"city": "Rome", ',
    '"days": 3',
    "}}\n</tool",
    "_call>",
]
SECOND = ["\n<tool_call>\n", '{"name": "clock", "arguments": {}}', "\n</tool_call>"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, threads=1, chat_template=HERMES) as running:
        yield running


def joined(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """The message that a stream of one choice makes, and why it ended."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        assert reason is None, "something follows the end"
        delta, reason = choice["delta"], choice["finish_reason"]
        message["content"] += delta.get("content", "")
        indices = [call["index"] for call in delta.get("tool_calls", ())]
        assert len(set(indices)) == len(indices), "clients take each entry of a chunk for a call of its own"
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({k: v for k, v in call.items() if k != "index"})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def plain(message: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    return message["content"] or "", [call["function"] for call in message.get("tool_calls") or ()]


async def test_calls_are_told_apart_whole_and_in_a_stream() -> None:
    body = {"model": "tiny", "messages": [QUESTION], "tools": [WEATHER, CLOCK], "logprobs": True}
    async with reciting([*CALL, *SECOND], HERMES) as client:
        whole = (await client.post(PATH, json=body)).json()["choices"][0]
        stream = events(await client.post(PATH, json={**body, "stream": True}))
        document = (await client.get("/openapi.json")).json()
    calls = [
        {"name": "weather", "arguments": '{"city": "Rome", "days": 3}'},
        {"name": "clock", "arguments": "{}"},
    ]
    message, reason = joined(stream)
    assert plain(whole["message"]) == plain(message) == ("Let me see.\n", calls)
    assert whole["finish_reason"] == reason == "tool_calls"
    assert len({call["id"] for call in whole["message"]["tool_calls"]}) == 2
    arguments = [
        call["function"]["arguments"]
        for chunk in stream
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert len(arguments) > len(calls), "arguments come as they are generated"
    schema = {**document["components"]["schemas"]["ChatChunk"], "components": document["components"]}
    for chunk in stream:
        jsonschema.validate(chunk, schema)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("words", "sent", "content", "num_calls", "reason"),
    [
        (CALL, {"tools": [CLOCK]}, "".join(CALL), 0, "stop"),
        (CALL, {"tools": [WEATHER], "tool_choice": "none"}, "".join(CALL), 0, "stop"),
        (CALL, {}, "".join(CALL), 0, "stop"),
        ([*CALL, *SECOND], {"tools": [WEATHER, CLOCK], "parallel_tool_calls": False}, "Let me see.\n", 1, "tool_calls"),
        (CALL, {"tools": [WEATHER], "max_tokens": 7}, "Let me see.\n", 1, "length"),
        (["It is", " 5."], {"tools": [WEATHER]}, "It is 5.", 0, "stop"),
    ],
)
async def test_a_call_is_one_where_its_function_may_be_called(
    words: list[str], sent: dict[str, Any], content: str, num_calls: int, reason: str, *, stream: bool
) -> None:
    async with reciting(words, HERMES) as client:
        response = await client.post(PATH, json={"model": "tiny", "messages": [QUESTION], **sent, "stream": stream})
    if stream:
        message, ended = joined(events(response))
    else:
        choice = response.json()["choices"][0]
        message, ended = choice["message"], choice["finish_reason"]
    assert (message["content"] or "", len(message.get("tool_calls") or ()), ended) == (content, num_calls, reason)


@pytest.mark.parametrize(
    ("num_words", "content", "arguments"),
    [
        (2, 'Let me see.\n<tool_call>\n{"name": "wea', []),
        (4, "Let me see.\n", ['{"city": "Rome"']),
        (5, "Let me see.\n", ['{"city": "Rome", "days": 3']),
    ],
)
async def test_a_call_that_is_cut_off_is_the_same_whole_and_in_a_stream(
    num_words: int, content: str, arguments: list[str]
) -> None:
    body = {"model": "tiny", "messages": [QUESTION], "tools": [WEATHER], "max_tokens": num_words}
    async with reciting(CALL, HERMES) as client:
        choice = (await client.post(PATH, json=body)).json()["choices"][0]
        message, reason = joined(events(await client.post(PATH, json={**body, "stream": True})))
    assert (
        plain(choice["message"])
        == plain(message)
        == (content, [{"name": "weather", "arguments": each} for each in arguments])
    )
    assert choice["finish_reason"] == reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"]
)
async def test_a_demanded_call_is_made_and_obeys_its_schema(stack: Stack, choice: object, *, stream: bool) -> None:
    body = {"model": "demo", "temperature": 0, "messages": [QUESTION], "tools": [WEATHER], "tool_choice": choice}
    response = await stack.post({**body, "stream": stream}, PATH)
    assert response.status_code == 200, response.text
    if stream:
        message, reason = joined(events(response))
    else:
        found = response.json()["choices"][0]
        message, reason = found["message"], found["finish_reason"]
    content, (call,) = plain(message)
    assert (content, call["name"], reason) == ("", "weather", "tool_calls")
    jsonschema.validate(json.loads(call["arguments"]), PARAMETERS)


async def test_calls_and_their_results_are_in_the_prompt_of_the_next_turn(stack: Stack) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome", "days": 3}'}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    rendered = (await stack.post({"messages": messages, "tools": [WEATHER]}, "/apply-template")).json()["prompt"]
    assert f"<tools>{json.dumps(WEATHER)}</tools>" in rendered
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 3}}</tool_call>' in rendered
    assert rendered.endswith("<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n")
    counted = (await stack.post({"messages": messages, "tools": [WEATHER]}, "/tokenize")).json()["count"]
    for sent, num_tokens in (({"tools": [WEATHER]}, counted), ({"tools": [WEATHER], "tool_choice": "none"}, None)):
        body = {"model": "demo", "messages": messages, "max_tokens": 1, **sent}
        usage = (await stack.post(body, PATH)).json()["usage"]
        assert (usage["prompt_tokens"] == counted) is (num_tokens is not None)


@pytest.mark.parametrize(("tool_parser", "is_call"), [("mistral", True), ("hermes", False), (None, False)])
async def test_calls_are_read_in_the_form_that_an_operator_names_whatever_the_template_shows(
    tool_parser: ToolParserName | None, is_call: bool
) -> None:
    words = ['[TOOL_CALLS]clock[ARGS]{"a"', ": 1}"]
    body = {"model": "tiny", "messages": [QUESTION], "tools": [CLOCK]}
    async with reciting(words, HERMES, tool_parser=tool_parser) as client:
        whole = (await client.post(PATH, json=body)).json()["choices"][0]["message"]
        stream, _ = joined(events(await client.post(PATH, json={**body, "stream": True})))
    said = ("", [{"name": "clock", "arguments": '{"a": 1}'}]) if is_call else ("".join(words), [])
    assert plain(whole) == plain(stream) == said


FAMILIES: list[tuple[ToolParserName, str]] = [
    ("hermes", '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}"}}}}\n</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"),
    ("pythonic", '[weather(city="{}")]'),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{{"city": "{}"}}'
     "<｜tool▁call▁end｜>"),
    ("harmony", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     '<|constrain|>json<|message|>{{"city": "{}"}}'),
    ("gemma4", '<|tool_call>call:weather{{city:<|"|>{}<|"|>}}<tool_call|>'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     '{{"city": "{}"}}<|tool_call_end|><|tool_calls_section_end|>'),
]  # fmt: skip
CITIES = ["Rome", "Oslo", "Bern"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "call"), FAMILIES, ids=[name for name, _ in FAMILIES])
async def test_an_agent_goes_on_from_call_to_call_in_the_form_of_each_family(
    name: ToolParserName, call: str, *, stream: bool
) -> None:
    texts = [[*re.findall(r".{1,3}", call.format(city), re.DOTALL)] for city in CITIES] + [["All", " done."]]
    messages: list[dict[str, Any]] = [QUESTION]
    async with reciting(
        texts, "{{ messages }}", tool_parser=name, reasoning_parser="harmony" if name == "harmony" else None
    ) as client:
        for city in CITIES:
            message = await answered(client, messages, stream=stream)
            (made,) = message["tool_calls"]
            assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("weather", {"city": city})
            assert not message["content"]
            messages += [message, {"role": "tool", "tool_call_id": made["id"], "content": "sunny"}]
        assert (await answered(client, messages, stream=stream))["content"] == "All done."


async def answered(client: httpx.AsyncClient, messages: list[dict[str, Any]], *, stream: bool) -> dict[str, Any]:
    """The message that comes next, as an agent keeps it."""
    body = {"model": "tiny", "messages": messages, "tools": [WEATHER_ANYWHERE], "stream": stream}
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    message, reason = joined(events(response)) if stream else (response.json()["choices"][0]["message"], None)
    assert reason in (None, "tool_calls", "stop")
    return {"role": "assistant", "content": message["content"], "tool_calls": message.get("tool_calls") or []}


@pytest.mark.parametrize(("choice", "is_call"), [("required", True), ("auto", False)])
async def test_a_demanded_call_is_no_thought_although_the_prompt_ends_in_one(choice: str, is_call: bool) -> None:
    words = ["<tool_call>", '{"name": "clock", "arguments": {}}', "</tool_call>"]
    body = {"model": "tiny", "messages": [QUESTION], "tools": [CLOCK], "tool_choice": choice}
    async with reciting(words, HERMES + "{{ '</think>' }}", "<think>\n") as client:
        message = (await client.post(PATH, json=body)).json()["choices"][0]["message"]
    assert ("tool_calls" in message, "reasoning_content" in message) == (is_call, not is_call)


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_that_the_template_does_not_show_are_told_and_calls_are_read_as_they_were_told(
    *, stream: bool
) -> None:
    body = {"model": "tiny", "messages": [QUESTION], "tools": [WEATHER], "stream": stream}
    async with reciting(CALL, "{{ messages }}", tool_prompt="prompt") as client:
        response = await client.post(PATH, json=body)
        without = await client.post(PATH, json={**body, "tool_choice": "none"})
    message, reason = joined(events(response)) if stream else (response.json()["choices"][0]["message"], "tool_calls")
    assert plain(message)[1] == [{"name": "weather", "arguments": '{"city": "Rome", "days": 3}'}]
    assert (response.headers["x-tool-prompt"], reason) == ("default", "tool_calls")
    assert "x-tool-prompt" not in without.headers


async def test_tools_that_the_template_does_not_show_are_refused_where_the_model_is_set_so() -> None:
    async with reciting(CALL, "{{ messages }}", tool_prompt="refuse") as client:
        response = await client.post(PATH, json={"model": "tiny", "messages": [QUESTION], "tools": [WEATHER]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


async def test_what_a_length_cut_off_can_be_sent_back(stack: Stack) -> None:
    """It was a 400 on our own output: vLLM #43995."""
    body = {"model": "demo", "messages": [QUESTION], "tools": [WEATHER], "tool_choice": "required", "max_tokens": 44}
    message, reason = joined(events(await stack.post({**body, "stream": True, "temperature": 0}, PATH)))
    assert (reason, len(message["tool_calls"])) == ("length", 1)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
    again = await stack.post({**body, "messages": [QUESTION, {"role": "assistant", **message}, result]}, PATH)
    assert again.status_code == 200
