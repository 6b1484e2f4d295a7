"""Law: what a request gets does not depend on what else is computed, whatever it asks for."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.flow.stack import Stack, running_stack

NUM_REQUESTS = 120
ANIMALS = ["cat", "dog", "fox", "owl", "bear", "hen", "frog", "mouse"]

# Each request takes a few of these; those that contradict each other stand under one name.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": t} for t in (0, 0.3, 0.9, 1.4)],
    "truncation": [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}],
    "shape": [{"typical_p": 0.7}, {"top_n_sigma": 1.2}, {"dynatemp_range": 0.4}, {"mirostat": 1}, {"mirostat": 2}],
    "xtc": [{"xtc_probability": 0.7, "xtc_threshold": 0.05}],
    "order": [{"samplers": ["top_k", "top_p", "temperature"], "top_k": 20, "top_p": 0.95}],
    "penalties": [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.8, "frequency_penalty": 0.4},
        {"repeat_penalty": 1.2, "repeat_last_n": 12},
    ],
    "dry": [{"dry_multiplier": 0.8}, {"dry_multiplier": 2.0, "dry_allowed_length": 1}],
    "bias": [{"logit_bias": {"50": -5, "60": 3}}, {"logit_bias": [[70, False], [" the", -2]]}],
    "stops": [{"stop": ["e ", "."]}, {"stop_regex": "[aeiou]t"}, {"stop_token_ids": [17, 300]}],
    "endings": [{"min_tokens": 6}, {"ignore_eos": True}, {"no_stop_trim": True, "stop": "a"}],
    "choices": [{"n": 2}, {"n": 1, "best_of": 3}],
    "logprobs": [{"logprobs": 2}, {"logprobs": 1, "echo": True}, {"echo": True}],
    "dialect": [{}],
}
MODELS = ["demo", "demo:pirate", "demo:shout", "demo:json"]


def mixed_request(number: int) -> dict[str, Any]:
    generator = random.Random(number)
    prompt = f"Once upon a time there was a {ANIMALS[number % 8]}" + " and a friend" * generator.randrange(6)
    body: dict[str, Any] = {
        "model": MODELS[number % 4],
        "prompt": prompt,
        "max_tokens": generator.randrange(8, 30),
        "seed": number,
    }
    for name in generator.sample(sorted(OPTIONS), 5):
        body |= generator.choice(OPTIONS[name])
    return body


async def answer(stack: Stack, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await stack.post(body)
    assert response.status_code == 200, (body, response.text)
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def assert_same(got: list[dict[str, Any]], expected: list[dict[str, Any]], *, body: dict[str, Any]) -> None:
    """Equal, numbers to a ten-thousandth."""
    for one, other in zip(got, expected, strict=True):
        logprobs, others = one.pop("logprobs"), other.pop("logprobs")
        assert one == other, body
        assert (logprobs is None) == (others is None), body
        if logprobs is None:
            continue
        assert logprobs["tokens"] == others["tokens"], body
        assert logprobs["text_offset"] == others["text_offset"], body
        pairs = zip(logprobs["token_logprobs"], others["token_logprobs"], strict=True)
        assert all(a == b or abs(a - b) < 1e-4 for a, b in pairs), body


@pytest.mark.law("Company")
@pytest.mark.slow
async def test_120_concurrent_requests_of_mixed_options_each_equal_their_solo_result() -> None:
    bodies = [mixed_request(number) for number in range(NUM_REQUESTS)]
    async with running_stack() as stack:
        together = await asyncio.gather(*(answer(stack, body) for body in bodies))
        await stack.settled()
    async with running_stack(num_replicas=1, prefix_cache=False) as lonely:
        for body, got in zip(bodies, together, strict=True):
            assert_same(got, await answer(lonely, body), body=body)
