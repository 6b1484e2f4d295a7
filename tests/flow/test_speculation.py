"""Predictions and prompt lookup through the whole house: hints that change no choice, and usage that tells of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from tests.engine.harness import FreeGuesses, core_of
from tests.flow.stack import Stack, running_stack
from tests.flow.test_forced_tokens import REQUESTS, body_of, same

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
PROMPT = "Once upon a time there was a little girl. She had a red ball. Once upon a time there was a little"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guessing() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, speculation="prompt_lookup") as running:
        core_of(running.services[0]).speculator.costs = FreeGuesses()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, speculation="none", max_forced_tokens=0) as running:
        yield running


async def answer(stack: Stack, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    response = await stack.post(body, path)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.law("Guesses")
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_constrained_choice_is_the_same_to_its_last_log_probability(
    guessing: Stack, plain: Stack, name: str
) -> None:
    """What it comes to, sent as a prediction, is guessed; so is a prediction that leaves the constraint."""
    body = body_of(name)
    drawn = (await answer(plain, body))["choices"]
    token_ids = drawn[0]["token_ids"]
    for prediction in (token_ids, [each + (at % 5 == 4) for at, each in enumerate(token_ids)]):
        found = (await answer(guessing, {**body, "speculation": prediction}))["choices"]
        assert same(found, drawn), drawn
    await guessing.settled()


async def test_usage_tells_what_was_guessed_where_something_was_expected(guessing: Stack) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    first = await answer(guessing, body)
    assert "completion_tokens_details" not in first["usage"]
    text = first["choices"][0]["text"]
    for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]):
        found = await answer(guessing, {**body, "prediction": {"type": "content", "content": content}})
        assert found["choices"][0]["text"] == text
        details = found["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 20
        assert details["rejected_prediction_tokens"] < 10
    found = await answer(guessing, {**body, "speculation": "Nothing of this will come, and so none of it is drawn."})
    assert found["choices"][0]["text"] == text


async def test_a_stream_with_several_tokens_per_event_adds_up_to_the_body(guessing: Stack) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "logprobs": 1, "return_token_ids": True}
    whole = (await guessing.complete(**body))["choices"][0]
    events = await guessing.stream(**body, speculation=whole["token_ids"], stream_options={"include_usage": True})
    parts = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token_id for part in parts for token_id in part["token_ids"]] == whole["token_ids"]
    assert len(parts) < len(whole["token_ids"]) / 2
    assert events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20


async def test_a_chat_takes_a_prediction(guessing: Stack) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 30, "temperature": 0}
    first = await answer(guessing, body, "/v1/chat/completions")
    expected = first["choices"][0]["message"]["content"]
    sent = {**body, "prediction": {"type": "content", "content": expected}}
    found = await answer(guessing, sent, "/v1/chat/completions")
    assert found["choices"][0]["message"]["content"] == expected
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


async def test_what_is_no_prediction_is_refused_by_name(guessing: Stack) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4}
    size = core_of(guessing.services[0]).model.vocab_size
    for sent, param in (
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "other", "content": "a"}}, "prediction"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url", "text": "a"}]}}, "prediction"),
        ({"speculation": {"type": "content"}}, "speculation"),
        ({"speculation": [1, "a"]}, "speculation[1]"),
        ({"speculation": [1, size]}, "speculation"),
        ({"speculation": "a", "prediction": {"type": "content", "content": "a"}}, "speculation"),
    ):
        response = await guessing.post({**body, **sent})
        assert response.status_code == 400, sent
        assert response.json()["error"]["param"] == param


async def test_guesses_are_counted_in_the_metrics_of_the_model(guessing: Stack) -> None:
    load = core_of(guessing.services[0]).load
    assert 0 < load.num_accepted_tokens <= load.num_drafted_tokens
    assert replace(load, num_drafted_tokens=0) != load
