"""Tokens, properties and adapters of the embedded model, with the real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.flow.stack import Stack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1) as made:
        yield made


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


async def test_tokens_of_a_text_complete_as_the_text_does(stack: Stack) -> None:
    text = "Once upon a time"
    tokens = (await stack.post({"model": "demo", "prompt": text}, "/tokenize")).json()["tokens"]
    by_text = await stack.complete(prompt=text, max_tokens=8)
    by_tokens = await stack.complete(prompt=tokens, max_tokens=8)
    assert by_tokens["choices"][0]["text"] == by_text["choices"][0]["text"]
    assert by_text["usage"]["prompt_tokens"] == len(tokens)
    assert (await stack.post({"tokens": tokens}, "/detokenize")).json()["content"] == text


async def test_a_native_completion_is_the_same_text(stack: Stack) -> None:
    expected = await stack.complete(prompt="Once upon a time", max_tokens=8)
    body = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0, "samplers": ["temperature"]}
    native = (await stack.post(body, "/completion")).json()
    assert native["content"] == expected["choices"][0]["text"]


async def test_a_stop_regex_ends_a_completion_and_a_bad_one_is_refused(stack: Stack) -> None:
    whole = (await stack.complete(prompt="Once upon a time", max_tokens=12))["choices"][0]["text"]
    body = await stack.complete(prompt="Once upon a time", max_tokens=12, stop_regex=r"[a-z]+ [a-z]+")
    stopped = body["choices"][0]
    assert whole.startswith(stopped["text"])
    assert len(stopped["text"]) < len(whole)
    assert stopped["matched_stop"] == r"[a-z]+ [a-z]+"
    refused = await stack.post({"model": "demo", "prompt": "a", "stop_regex": r"(a)\1"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_regex")


async def test_the_engines_own_numbers_reach_the_metrics(stack: Stack) -> None:
    await stack.complete(prompt="Once upon a time", max_tokens=4)
    lines = (await stack.get("/metrics")).text.splitlines()
    steps = next(line for line in lines if line.startswith("serve_app_replica_steps_total{"))
    assert float(steps.rpartition(" ")[2]) >= 4
    queue = next(line for line in lines if line.startswith("serve_app_queue_seconds_sum{"))
    assert float(queue.rpartition(" ")[2]) >= 0
