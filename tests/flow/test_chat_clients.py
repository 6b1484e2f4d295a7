"""OpenAI's own client in a chat: what it sends is taken, what it gets it can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.flow.stack import running_stack

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

QUESTION: ChatCompletionMessageParam = {"role": "user", "content": "What is the capital of France?"}
ANSWER = "The capital of France is Paris."


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncOpenAI]:
    async with running_stack(num_replicas=1, threads=1) as stack:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(stack.app), base_url="http://flow")
        async with AsyncOpenAI(base_url="http://flow/v1", api_key="none", http_client=http, max_retries=0) as made:
            yield made


async def test_a_chat_is_read_whole_and_in_a_stream(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="demo", messages=[QUESTION], temperature=0)
    assert chat.choices[0].message.content == ANSWER
    assert chat.usage is not None
    stream = await client.chat.completions.create(
        model="demo", messages=[QUESTION], temperature=0, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = ["", ""], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [ANSWER, ANSWER]
    assert usage is not None
    assert usage.completion_tokens == 2 * chat.usage.completion_tokens


async def test_chats_at_once_are_each_answered(client: AsyncOpenAI) -> None:
    create = client.chat.completions.create
    chats = await asyncio.gather(*(create(model="demo", messages=[QUESTION], temperature=0) for _ in range(6)))
    assert {chat.choices[0].message.content for chat in chats} == {ANSWER}


async def test_log_probabilities_are_read(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="demo", messages=[QUESTION], temperature=0, logprobs=True, top_logprobs=3, max_completion_tokens=3
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [3, 3, 3]
    assert chat.choices[0].finish_reason == "length"


async def test_a_pydantic_model_is_what_the_message_is_parsed_into(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.parse(
        model="demo", messages=[QUESTION], response_format=Weather, temperature=0
    )
    assert isinstance(chat.choices[0].message.parsed, Weather)
    async with client.chat.completions.stream(
        model="demo", messages=[QUESTION], response_format=Weather, temperature=0
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == chat.choices[0].message.parsed


async def test_a_tool_is_called_and_its_result_answered(client: AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather)
    messages: list[ChatCompletionMessageParam] = [QUESTION]
    chat = await client.chat.completions.parse(
        model="demo", messages=messages, tools=[tool], tool_choice="required", temperature=0
    )
    message = chat.choices[0].message
    assert chat.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    async with client.chat.completions.stream(
        model="demo", messages=messages, tools=[tool], tool_choice="required", temperature=0
    ) as stream:
        streamed = (await stream.get_final_completion()).choices[0].message.tool_calls
    assert streamed is not None
    assert streamed[0].function.arguments == call.function.arguments
    sent = message.model_dump()  # with every null that the client makes of what was not there
    next_turn = [*messages, sent, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = await client.chat.completions.create(
        model="demo", messages=next_turn, tools=[tool], temperature=0, max_tokens=4
    )
    assert answer.choices[0].message.content


class Place(BaseModel):
    """A city alone: its call is so short that its name and the beginning of its arguments come in one step."""

    city: Literal["Paris", "Rome"]


async def test_the_arguments_of_a_streamed_call_are_parsed_as_they_come(client: AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Place)
    async with client.chat.completions.stream(
        model="demo", messages=[QUESTION], tools=[tool], tool_choice="required", temperature=0
    ) as stream:
        calls = (await stream.get_final_completion()).choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert isinstance(call.function.parsed_arguments, Place)


async def test_json_mode_is_json_and_ends_where_the_model_or_the_client_says_so(client: AsyncOpenAI) -> None:
    """It promises no end: who never closes an object is cut by `max_tokens`, or by the context."""
    wish: ChatCompletionMessageParam = {"role": "user", "content": "city, as JSON"}
    create = partial(client.chat.completions.create, messages=[wish], temperature=0, max_tokens=60)
    trained, untrained = [
        (await create(model=model, response_format={"type": "json_object"})).choices[0]
        for model in ("demo:json", "demo")
    ]
    assert trained.finish_reason == "stop"
    assert isinstance(json.loads(trained.message.content or ""), dict)
    assert untrained.finish_reason == "length"
    assert (untrained.message.content or "").startswith("{")


async def test_a_refusal_is_the_clients_own_error(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="demo", messages=[])
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nobody", messages=[QUESTION])


async def test_a_response_is_read_whole_in_a_stream_and_parsed(client: AsyncOpenAI) -> None:
    question = str(QUESTION["content"])
    whole = await client.responses.create(model="demo", input=question, temperature=0, store=True)
    assert (whole.output_text, whole.status) == (ANSWER, "completed")
    assert whole.usage is not None
    async with client.responses.stream(model="demo", input=question, temperature=0) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.usage is not None
    assert (final.output_text, final.usage.output_tokens) == (ANSWER, whole.usage.output_tokens)
    assert (kinds[:3], kinds[-1]) == (
        ["response.created", "response.in_progress", "response.output_item.added"], "response.completed",
    )  # fmt: skip
    parsed = await client.responses.parse(model="demo", input=question, text_format=Weather, temperature=0)
    assert isinstance(parsed.output_parsed, Weather)
    cut = await client.responses.create(model="demo", input=question, temperature=0, max_output_tokens=2)
    assert cut.incomplete_details is not None
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_responses_call_goes_round(client: AsyncOpenAI) -> None:
    parameters = {**Place.model_json_schema(), "additionalProperties": False}
    tool: Any = {"type": "function", "name": "look", "parameters": parameters, "strict": True}
    asked: list[Any] = [QUESTION]
    first = await client.responses.create(
        model="demo", input=asked, tools=[tool], tool_choice="required", temperature=0
    )
    (call,) = first.output
    assert call.type == "function_call"
    Place.model_validate_json(call.arguments)
    async with client.responses.stream(
        model="demo", input=asked, tools=[tool], tool_choice={"type": "function", "name": "look"}, temperature=0
    ) as stream:
        (streamed,) = (await stream.get_final_response()).output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [*asked, *(item.model_dump() for item in first.output), result]  # with every null that the client makes
    answer = await client.responses.create(model="demo", input=items, tools=[tool], temperature=0, max_output_tokens=4)
    assert answer.output_text


async def test_what_a_response_cannot_do_is_refused_by_name(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Send the whole conversation"):
        await client.responses.create(model="demo", input="a", previous_response_id="resp_1")
