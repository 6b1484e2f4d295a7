"""The engine's laws for constrained texts: nothing else that is computed changes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine.harness import core_of
from tests.flow.stack import Stack, running_stack

LONG = "The quick brown fox jumps over the lazy dog. " * 6
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": LONG, "regex": "[a-z ]{20,60}", "temperature": 0},
    {"prompt": "Once", "json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 9}},
    {"prompt": "A cat", "grammar": "root ::= ('the ' [a-z]+ ' ')* '.'", "seed": 4, "top_p": 0.9},
    {"prompt": LONG, "temperature": 0},
    {"prompt": ["x", LONG], "regex": "(yes|no|maybe)( and (yes|no))*!", "n": 2, "seed": 9},
    {"prompt": "Once", "temperature": 1, "seed": 2, "min_p": 0.1},
    {"prompt": LONG, "regex": "[0-9]{30,40}", "temperature": 1, "seed": 8, "ignore_eos": True},
    {"prompt": "Tell", "ebnf": "root ::= s | s root\ns ::= [A-Z] [a-z]+ '.'", "temperature": 0.7, "seed": 1},
)

MAX_ROUNDS = 24
"""In one of which a place is lost; who comes when is the clock's to say."""

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]


async def texts_of(stack: Stack, body: dict[str, Any]) -> list[tuple[str, str]]:
    response = await stack.post({"model": "demo", "max_tokens": 32, "seed": 1, **body})
    assert response.status_code == 200, response.text
    return [(choice["text"], choice["finish_reason"]) for choice in response.json()["choices"]]


@pytest.mark.law("Constraints")
async def test_constrained_texts_are_the_same_in_company_in_chunks_and_after_preemption() -> None:
    async with running_stack(num_replicas=1) as stack:
        alone = [await texts_of(stack, body) for body in REQUESTS]
    # a budget that a few of them fill, prompts cut into pieces of a few tokens, room for one and a half of the longest:
    # with room for one only, the second waits at the door and nobody is asked to leave
    async with running_stack(
        num_replicas=1, max_batch_tokens=16, kv_cache_bytes=550_000, max_num_sequences=12, prefix_cache=False
    ) as stack:
        for body in REQUESTS:
            await texts_of(stack, {**body, "max_tokens": 1})  # what is compiled now is not waited for below
        for _ in range(MAX_ROUNDS):
            together = await asyncio.gather(*(texts_of(stack, body) for body in REQUESTS))
            assert list(together) == alone
            if core_of(stack.services[0]).num_preemptions:
                break
        assert core_of(stack.services[0]).num_preemptions > 0
        await stack.settled()
