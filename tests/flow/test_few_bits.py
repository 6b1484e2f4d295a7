"""From bytes to bytes with weights in few bits: streams, adapters, company and constraints as with plain ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest

from tests.flow.stack import Stack, running_stack

pytestmark = pytest.mark.slow

BODIES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time there was a little cat", "max_tokens": 24},
    {"prompt": "The dog and the owl went", "max_tokens": 16, "temperature": 0.8, "seed": 3},
    {"prompt": "Once upon a time there was a little cat", "max_tokens": 20, "model": "demo:pirate"},
    {"prompt": "One day,", "max_tokens": 12, "logprobs": 2, "model": "demo:shout"},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
    "required": ["name"],
    "additionalProperties": False,
}


async def text_of(stack: Stack, body: dict[str, Any]) -> str:
    text: str = (await stack.complete(**body))["choices"][0]["text"]
    return text


@pytest.mark.parametrize("weights", ["int8", "int4"])
async def test_a_stream_adds_up_to_the_answer(weights: Literal["int8", "int4"]) -> None:
    async with running_stack(num_replicas=1, weights=weights) as stack:
        for body in BODIES:
            text = await text_of(stack, body)
            events = await stack.stream(**body)
            assert text
            assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == text
        await stack.settled()


async def test_answers_in_eight_bits_are_the_same_alone_and_in_company() -> None:
    async with running_stack(num_replicas=1, weights="int8") as stack:
        alone = [await text_of(stack, body) for body in BODIES]
        assert await asyncio.gather(*(text_of(stack, body) for body in BODIES * 3)) == alone * 3
        await stack.settled()


async def test_a_schema_is_satisfied_in_four_bits() -> None:
    async with running_stack(num_replicas=1, weights="int4") as stack:
        body = {"prompt": "A record: ", "max_tokens": 60, "json_schema": SCHEMA}
        answer = json.loads(await text_of(stack, body))
        assert set(answer) == {"name"}
        assert isinstance(answer["name"], str)
