"""Tokens that a constraint leaves no choice about: appended at once they are those that would be drawn one by one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.engine.harness import core_of
from tests.flow.stack import Stack, running_stack

RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 999},
        "classification": {"enum": ["positive", "negative", "undecided"]},
        "explanation_of_the_classification": {"type": "string", "maxLength": 12},
        "is_confirmed_by_a_person": {"type": "boolean"},
    },
    "required": ["identifier", "classification", "explanation_of_the_classification", "is_confirmed_by_a_person"],
    "additionalProperties": False,
}
CONSTANT = {"const": "all of this is known before anything is computed"}
LONG = "The quick brown fox jumps over the lazy dog. " * 6
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeds": {"n": 3, "seed": 5},
    "hot": {"temperature": 2, "seed": 6},
    "constant": {"json_schema": CONSTANT, "temperature": 0},
    "constant with logprobs": {"json_schema": CONSTANT, "logprobs": 2},
    "logprobs": {"n": 2, "seed": 7, "logprobs": 3},
    "post sampling": {"seed": 8, "logprobs": 2, "post_sampling_probs": True, "top_k": 5},
    "post sampling, greedy": {"temperature": 0, "logprobs": 2, "post_sampling_probs": True},
    "mirostat": {"seed": 9, "mirostat": 2, "mirostat_tau": 2},
    "penalties": {"seed": 10, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "dry_multiplier": 0.8},
    "stop within": {"seed": 11, "stop": ["tion_of"]},
    "stop within, with logprobs": {"seed": 11, "stop": ["tion_of"], "logprobs": 1},
    "stop kept": {"seed": 11, "stop": ["ation"], "no_stop_trim": True},
    "stop before enough": {"seed": 11, "stop": ["tion_of"], "min_tokens": 40},
    "pattern": {"seed": 11, "stop_regex": ["_[a-z]+_a"], "logprobs": 1},
    "ranked": {"seed": 12, "best_of": 3},
    "echo": {"seed": 13, "echo": True, "logprobs": 2},
    "prompt logprobs": {"seed": 14, "prompt_logprobs": 2},
    "bad words": {"seed": 15, "bad_words": ["positive"]},
    "compact": {"json_schema": None, "structured_outputs": {"json": RECORD, "disable_any_whitespace": True}},
    "no constraint": {"json_schema": None, "seed": 3},
    "long prompt": {"prompt": LONG, "seed": 16},
    "two prompts": {"prompt": ["Once", LONG], "n": 2, "seed": 17, "logprobs": 1},
    **{f"at most {count}": {"seed": 18, "max_tokens": count} for count in (1, 2, 3, 7, 12, 13, 14, 15)},
    **{f"at most {count}, scored": {"seed": 18, "max_tokens": count, "logprobs": 1} for count in (1, 2, 7, 13, 14)},
}
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forcing() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drawing() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, max_forced_tokens=0) as running:
        yield running


def body_of(name: str) -> dict[str, Any]:
    common = {"model": "demo", "prompt": "A record: ", "max_tokens": 80, "json_schema": RECORD, "seed": 1}
    return {**common, "return_token_ids": True, **REQUESTS[name]}


async def choices_of(stack: Stack, name: str, **changes: Any) -> list[dict[str, Any]]:
    response = await stack.post({**body_of(name), **changes})
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def same(left: Any, right: Any) -> bool:
    """Equal, log-probabilities nearly: keys and values of several tokens are computed at once, or one by one."""
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) < 1e-3
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drawn(drawing: Stack) -> dict[str, list[dict[str, Any]]]:
    """Choices of every request, asked for alone and drawn token by token."""
    return {name: await choices_of(drawing, name) for name in REQUESTS}


@pytest.mark.law("Force")
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_choice_is_the_same_to_its_last_log_probability(
    forcing: Stack, drawn: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert same(await choices_of(forcing, name), drawn[name]), drawn[name]


async def test_steps_are_saved_where_tokens_are_forced_and_nowhere_else(forcing: Stack, drawing: Stack) -> None:
    """Every token that was forced is one step less, but for those scored, of which a run takes one step."""

    async def cost(stack: Stack, name: str, **changes: Any) -> tuple[int, int]:
        engine = core_of(stack.services[0])
        before = engine.num_steps, engine._output.num_forced
        await choices_of(stack, name, **changes)
        await stack.settled()
        return engine.num_steps - before[0], engine._output.num_forced - before[1]

    for name in ("greedy", "seeds", "hot", "stop within"):
        steps, num_forced = await cost(forcing, name, n=1)
        steps_without, none = await cost(drawing, name, n=1)
        assert none == 0 < num_forced
        assert steps == steps_without - num_forced
    steps, num_forced = await cost(forcing, "constant with logprobs")
    steps_without, _ = await cost(drawing, "constant with logprobs")
    assert steps_without - num_forced <= steps < steps_without / 3
    assert await cost(forcing, "no constraint") == await cost(drawing, "no constraint")


@pytest.mark.parametrize("name", ["greedy", "logprobs", "stop within, with logprobs", "two prompts", "at most 13"])
async def test_a_stream_adds_up_to_the_body(forcing: Stack, name: str) -> None:
    whole = await choices_of(forcing, name)
    events = await forcing.stream(
        **{name_: value for name_, value in body_of(name).items() if name_ != "model"}
        | {"temperature": REQUESTS[name].get("temperature", 1)}
    )
    for choice in whole:
        parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token_id for part in parts for token_id in part["token_ids"]] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"] is not None:
            for member in ("tokens", "text_offset"):
                found = [each for part in parts if part["logprobs"] for each in part["logprobs"][member]]
                assert found == choice["logprobs"][member]


@pytest.mark.law("Force")
async def test_they_are_the_same_in_company_in_small_steps_and_after_preemption(
    drawn: dict[str, list[dict[str, Any]]],
) -> None:
    async with running_stack(
        num_replicas=1, max_batch_tokens=12, max_logit_rows=5, kv_cache_bytes=900_000, max_num_sequences=12,
        prefix_cache=False,
    ) as stack:  # fmt: skip
        for name in ("greedy", "constant", "compact"):
            await choices_of(stack, name, max_tokens=1)  # what is compiled now is not waited for below
        together = await asyncio.gather(*(choices_of(stack, name) for name in REQUESTS))
        assert core_of(stack.services[0]).num_preemptions > 0
        assert core_of(stack.services[0])._output.num_forced > 0
        for (name, alone), found in zip(drawn.items(), together, strict=True):
            assert same(found, alone), name
        await stack.settled()


async def test_what_is_forced_and_forbidden_is_told_as_it_is_without(forcing: Stack, drawing: Stack) -> None:
    forced = forcing.services[0].tokenizer.encode_text(json.dumps(CONSTANT["const"]))
    for sent in (
        {"logit_bias": [[forced[3], False]]},
        {"allowed_token_ids": list(forced[:3])},
        {"stop_token_ids": [forced[5]], "min_tokens": 9},
        {"stop_token_ids": [forced[5]]},
    ):
        body = {**body_of("constant"), **sent}
        answers = [await stack.post(body) for stack in (forcing, drawing)]
        assert len({answer.status_code for answer in answers}) == 1
        found = [answer.json().get("choices") or answer.json()["error"]["message"] for answer in answers]
        assert found[0] == found[1]
