"""What a response carries on request: stops kept, ids, timings, cache details, rankings, dialects' habits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.flow.stack import Stack, running_stack

PROMPT = "Once upon a time"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1) as running:
        yield running


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


async def choice_of(stack: Stack, **body: Any) -> dict[str, Any]:
    choice: dict[str, Any] = (await stack.complete(prompt=PROMPT, **{"max_tokens": 30, **body}))["choices"][0]
    return choice


async def streamed_text(stack: Stack, **body: Any) -> str:
    chunks = await stack.stream(prompt=PROMPT, **{"max_tokens": 30, **body})
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("name", ["no_stop_trim", "include_stop_str_in_output"])
async def test_a_stop_stays_in_the_text_to_its_end_where_that_is_asked_for(stack: Stack, name: str) -> None:
    text = (await choice_of(stack))["text"]
    stop = text[10:14]
    trimmed = await choice_of(stack, stop=stop)
    kept = await choice_of(stack, stop=stop, **{name: True})
    assert trimmed["text"] == text[: text.index(stop)]
    assert kept["text"] == text[: text.index(stop) + len(stop)]
    assert (trimmed["matched_stop"], kept["matched_stop"]) == (stop, stop)
    assert await streamed_text(stack, stop=stop, **{name: True}) == kept["text"]


async def test_fireworks_keeps_the_stop_unless_it_was_told_not_to(stack: Stack) -> None:
    text = (await choice_of(stack))["text"]
    body = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 30, "stop": text[10:14]}
    kept = (await stack.post(body, dialect="fireworks")).json()["choices"][0]["text"]
    assert kept.endswith(text[10:14])
    told = (await stack.post({**body, "no_stop_trim": False}, dialect="fireworks")).json()["choices"][0]["text"]
    assert kept.startswith(told)
    assert told != kept


async def test_a_matched_expression_is_reported_by_its_pattern_and_trimmed(stack: Stack) -> None:
    text = (await choice_of(stack))["text"]
    place = text.index(" ", 8)
    pattern = text[place : place + 3].replace(" ", r"\s")
    trimmed = await choice_of(stack, stop_regex=pattern)
    assert trimmed["matched_stop"] == pattern
    assert text.startswith(trimmed["text"])
    kept = await choice_of(stack, stop_regex=[pattern], no_stop_trim=True)
    assert kept["text"] == text[: len(trimmed["text"]) + 3]
    assert await streamed_text(stack, stop_regex=pattern) == trimmed["text"]
    body = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 30, "stop_regex": pattern}
    assert (await stack.post(body, dialect="sglang")).json()["choices"][0]["text"] == kept["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_expression_is_a_400_before_anything_is_streamed(stack: Stack, stream: bool) -> None:
    response = await stack.post({"model": "demo", "prompt": PROMPT, "stop_regex": "a(", "stream": stream})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stop_regex")


async def test_token_ids_are_those_of_prompt_and_completion(stack: Stack) -> None:
    tokenizer = stack.services[0].tokenizer
    choice = await choice_of(stack, return_token_ids=True)
    assert tokenizer.decode(choice["token_ids"]) == choice["text"]
    assert tokenizer.decode(choice["prompt_token_ids"]) == PROMPT
    again = await stack.complete(prompt=choice["prompt_token_ids"], max_tokens=30)
    assert again["choices"][0]["text"] == choice["text"]
    chunks = await stack.stream(prompt=PROMPT, max_tokens=30, return_token_ids=True)
    assert [id_ for chunk in chunks for id_ in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [
        choice["prompt_token_ids"],
        *[None] * (len(chunks) - 1),
    ]


async def test_what_was_not_asked_for_is_absent(stack: Stack) -> None:
    body = await stack.complete(prompt=PROMPT, max_tokens=2)
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert set(body["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "matched_stop"}


@pytest.mark.parametrize("count", [1, 3, 99])
async def test_the_last_tokens_of_the_prompt_are_echoed(stack: Stack, count: int) -> None:
    whole = await choice_of(stack, echo=True, logprobs=1, max_tokens=3)
    last = await choice_of(stack, echo_last=count, logprobs=1, max_tokens=3)
    assert whole["text"].endswith(last["text"])
    tokens = last["logprobs"]["tokens"]
    assert tokens == whole["logprobs"]["tokens"][-(count + 3) :]
    shift = len(whole["text"]) - len(last["text"])
    offsets = whole["logprobs"]["text_offset"][-(count + 3) :]
    assert last["logprobs"]["text_offset"] == [offset - shift for offset in offsets]
    assert await streamed_text(stack, echo_last=count, max_tokens=3) == last["text"]


async def test_a_prompt_seen_before_is_cached_unless_the_client_declines(stack: Stack) -> None:
    prompt = "A prompt that is long enough to fill some blocks of keys and values, " * 4
    cold = await stack.complete(prompt=prompt, max_tokens=5)
    warm = await stack.complete(prompt=prompt, max_tokens=5, return_cached_tokens_details=True)
    declined = await stack.complete(prompt=prompt, max_tokens=5, cache_prompt=False)
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert warm["sglext"] == {"cached_tokens_details": {"device": cached, "host": 0}}
    assert declined["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["choices"] == warm["choices"] == declined["choices"]


async def test_the_tail_of_a_stream_has_its_order(stack: Stack) -> None:
    *_, finish, sglext, usage = await stack.stream(
        prompt=PROMPT, max_tokens=3, return_cached_tokens_details=True, stream_options={"include_usage": True}
    )
    assert finish["choices"][0]["finish_reason"] == "length"
    assert (sglext["choices"], set(sglext["sglext"])) == ([], {"cached_tokens_details"})
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)


async def test_timings_add_up_to_the_usage(stack: Stack) -> None:
    body = await stack.complete(prompt=PROMPT, max_tokens=5, timings_per_token=True)
    timings, usage = body["timings"], body["usage"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 5
    chunks = await stack.stream(prompt=PROMPT, max_tokens=5, timings_per_token=True)
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == sorted(
        chunk["timings"]["predicted_n"] for chunk in chunks
    )


async def events_of(stack: Stack, dialect: str, **body: Any) -> list[dict[str, Any]]:
    response = await stack.post({"model": "demo", "prompt": PROMPT, "stream": True, **body}, dialect=dialect)
    assert response.headers["x-completions-dialect"] == dialect
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("dialect", ["llama.cpp", "fireworks"])
async def test_the_last_finish_chunk_carries_the_usage_of_all(stack: Stack, dialect: str) -> None:
    chunks = await events_of(stack, dialect, n=2, max_tokens=3, ignore_eos=True)
    assert [("usage" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 2
    chosen = await events_of(stack, dialect, max_tokens=3, stream_options={"include_usage": True})
    assert (chosen[-1]["choices"], "usage" in chosen[-2]) == ([], False)


async def test_the_best_of_several_are_returned_in_the_order_of_their_likelihood(stack: Stack) -> None:
    body = {"model": "demo", "prompt": [PROMPT, "The cat"], "temperature": 1.5, "seed": 3, "max_tokens": 8}
    body |= {"logprobs": 0, "ignore_eos": True}
    every = (await stack.post({**body, "n": 5})).json()
    best = (await stack.post({**body, "n": 2, "best_of": 5})).json()

    def mean(choice: dict[str, Any]) -> float:
        found = choice["logprobs"]["token_logprobs"]
        total: float = sum(found) / len(found)
        return total

    for prompt in range(2):
        ranked = sorted(every["choices"][5 * prompt : 5 * prompt + 5], key=mean, reverse=True)
        returned = best["choices"][2 * prompt : 2 * prompt + 2]
        assert [choice["text"] for choice in returned] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"] | {"prompt_tokens_details": 0} == every["usage"] | {"prompt_tokens_details": 0}
    hidden = (await stack.post({**body, "n": 2, "best_of": 5, "logprobs": None})).json()
    assert [choice["text"] for choice in hidden["choices"]] == [choice["text"] for choice in best["choices"]]
    assert all(choice["logprobs"] is None for choice in hidden["choices"])


async def test_mistral_rs_returns_the_best_of_n_under_their_own_indices(stack: Stack) -> None:
    body = {"model": "demo", "prompt": PROMPT, "temperature": 1.5, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    every = (await stack.post({**body, "n": 5, "logprobs": 0})).json()["choices"]
    best = (await stack.post({**body, "n": 5, "best_of": 2}, dialect="mistral.rs")).json()["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [(each["index"], each["text"]) for each in best] == [(each["index"], each["text"]) for each in ranked[:2]]


@pytest.mark.parametrize(
    ("dialect", "status", "adapter_status", "shape"),
    [
        ("union", 400, 404, {"error"}),
        ("llama.cpp", 400, 404, {"error"}),
        ("mistral.rs", 422, 422, {"message"}),
        ("sglang", 400, 400, {"object", "message", "type", "param", "code", "error_code"}),
    ],
)
async def test_errors_have_the_shape_and_status_of_their_dialect(
    stack: Stack, dialect: str, status: int, adapter_status: int, shape: set[str]
) -> None:
    wrong = await stack.post({"model": "demo", "prompt": PROMPT, "temperature": 9}, dialect=dialect)
    assert (wrong.status_code, set(wrong.json())) == (status, shape)
    nobody = await stack.post({"model": "demo:nobody", "prompt": PROMPT}, dialect=dialect)
    assert nobody.status_code == adapter_status
    assert "nobody" in nobody.text


async def test_an_adapter_is_chosen_by_its_number(stack: Stack) -> None:
    adapters = stack.services[0].card.model.usable_adapters
    for number, adapter in enumerate(adapters):
        named = await stack.complete(model=f"demo:{adapter.name}", prompt=PROMPT)
        numbered = await stack.complete(prompt=PROMPT, lora=[{"id": number, "scale": 1.0}])
        assert numbered["choices"] == named["choices"]
    base = await stack.complete(prompt=PROMPT, lora=[{"id": 0, "scale": 0.0}])
    assert base["choices"] == (await stack.complete(prompt=PROMPT))["choices"]
    missing = await stack.post({"model": "demo", "prompt": PROMPT, "lora": [{"id": len(adapters), "scale": 1}]})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "lora")


async def test_scoring_a_text_gives_the_logprobs_that_its_generation_gave(stack: Stack) -> None:
    made = await choice_of(stack, max_tokens=12, logprobs=True, top_logprobs=2, return_token_ids=True)
    ids = [*made["prompt_token_ids"], *made["token_ids"]]
    scored = (await stack.complete(prompt=ids, max_tokens=0, echo=True, logprobs=2))["choices"][0]
    count = len(made["logprobs"]["tokens"])
    offset = len(made["prompt_token_ids"])
    again = scored["logprobs"]["token_logprobs"][offset : offset + count]
    assert again == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-4)


async def test_probabilities_after_sampling_are_those_it_was_drawn_from(stack: Stack) -> None:
    sampled = {"temperature": 1, "top_k": 1, "logprobs": 0, "max_tokens": 4}
    raw = (await choice_of(stack, **sampled))["logprobs"]["token_logprobs"]
    after = (await choice_of(stack, **sampled, post_sampling_probs=True))["logprobs"]["token_logprobs"]
    assert after == [0.0] * 4
    assert any(logprob < -1e-3 for logprob in raw)
