"""Sampling parameters at the wire have the effect that their documents promise, with the real engine."""

from __future__ import annotations

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


async def text_of(stack: Stack, **body: Any) -> str:
    choice = (await stack.complete(prompt=PROMPT, **body))["choices"][0]
    text: str = choice["text"]
    return text


async def greedy_ids(stack: Stack, **body: Any) -> list[int]:
    choice = (await stack.complete(prompt=PROMPT, return_token_ids=True, **{"max_tokens": 12, **body}))["choices"][0]
    ids: list[int] = choice["token_ids"]
    return ids


async def test_a_banned_token_is_not_drawn_in_any_form_of_logit_bias(stack: Stack) -> None:
    first = (await greedy_ids(stack))[0]
    for bias in ({str(first): -100}, {str(first): False}, [[first, False]], [[first, -100]]):
        assert first not in await greedy_ids(stack, logit_bias=bias)


async def test_a_forced_token_is_drawn_always(stack: Stack) -> None:
    assert await greedy_ids(stack, logit_bias={"7": 100}, max_tokens=4) == [7] * 4


async def test_a_text_key_of_logit_bias_is_cut_into_tokens_by_the_replica(stack: Stack) -> None:
    tokenizer = stack.services[0].tokenizer
    word = next(w for w in (" the", " a", ",", ".", "e") if len(tokenizer.encode_text(w)) == 1)
    (token_id,) = tokenizer.encode_text(word)
    assert await greedy_ids(stack, logit_bias={word: 100}, max_tokens=3) == [token_id] * 3


async def test_a_biased_id_out_of_the_vocabulary_is_refused_but_by_llama_cpp_ignored(stack: Stack) -> None:
    body = {"model": "demo", "prompt": PROMPT, "logit_bias": {"999999": 1}}
    response = await stack.post(body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")
    assert (await stack.post(body, dialect="llama.cpp")).status_code == 200


PENALTIES = [
    {"presence_penalty": 2},
    {"frequency_penalty": 2},
    {"repetition_penalty": 2},
    {"repeat_penalty": 2},
]


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda each: next(iter(each)))
async def test_a_penalty_makes_a_text_repeat_itself_less(stack: Stack, penalty: dict[str, Any]) -> None:
    plain = await greedy_ids(stack, max_tokens=60, ignore_eos=True)
    penalised = await greedy_ids(stack, max_tokens=60, ignore_eos=True, **penalty)
    assert len(set(penalised)) > len(set(plain))


async def test_a_window_of_none_switches_the_penalties_off(stack: Stack) -> None:
    plain = await greedy_ids(stack, max_tokens=30)
    assert await greedy_ids(stack, max_tokens=30, repetition_penalty=2, repeat_last_n=0) == plain
    assert await greedy_ids(stack, max_tokens=30, repetition_penalty=2, repeat_last_n=-1) != plain


async def test_dry_breaks_a_loop_and_its_breakers_let_it_go_on(stack: Stack) -> None:
    tokenizer = stack.services[0].tokenizer
    words = [id_ for id_ in range(300, 900) if tokenizer.encode_text(tokenizer.decode([id_])) == (id_,)][:4]
    body = {"model": "demo", "temperature": 0, "prompt": [*words, *words, *words[:3]], "max_tokens": 1}
    body |= {"return_token_ids": True, "logit_bias": {str(words[3]): 100}}
    dry = {"dry_multiplier": 100, "dry_allowed_length": 1}

    async def next_token(**more: Any) -> int:
        token_id: int = (await stack.post({**body, **more})).json()["choices"][0]["token_ids"][0]
        return token_id

    assert await next_token() == words[3]
    assert await next_token(**dry) != words[3]
    assert await next_token(**dry, dry_sequence_breakers=[tokenizer.decode(words[2:3])]) == words[3]


RANDOM = [
    {"top_k": 1},
    {"top_p": 1e-9},
    {"min_p": 1},
    {"typical_p": 1e-9, "top_k": 1},
    {"top_n_sigma": 1e-6},
    {"mirostat": 2, "mirostat_tau": 1e-6},
    {"mirostat_target": 1e-6},
]


@pytest.mark.parametrize("options", RANDOM, ids=lambda each: next(iter(each)))
async def test_a_truncation_to_one_token_is_greedy(stack: Stack, options: dict[str, Any]) -> None:
    greedy = await greedy_ids(stack)
    assert await greedy_ids(stack, temperature=1.5, seed=3, **options) == greedy


async def test_xtc_takes_the_likeliest_away(stack: Stack) -> None:
    plain = await greedy_ids(stack, max_tokens=1)
    xtc = {"xtc_probability": 1, "xtc_threshold": 0.001, "temperature": 2, "max_tokens": 1}
    drawn = [await greedy_ids(stack, seed=seed, **xtc) for seed in range(8)]
    assert plain not in drawn


async def test_the_order_of_samplers_is_the_clients(stack: Stack) -> None:
    """Without `top_k` in the list, top_k truncates nothing."""
    body = {"temperature": 2, "seed": 1, "top_k": 1}
    assert await greedy_ids(stack, **body) == await greedy_ids(stack)
    assert await greedy_ids(stack, **body, samplers=["temperature"]) != await greedy_ids(stack)


async def test_dynamic_temperature_changes_what_is_drawn(stack: Stack) -> None:
    body = {"temperature": 1.5, "seed": 5, "max_tokens": 30}
    assert await greedy_ids(stack, **body, dynatemp_range=0.9) != await greedy_ids(stack, **body)


async def test_a_stop_token_ends_with_its_id(stack: Stack) -> None:
    ids = await greedy_ids(stack)
    place = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    body = await stack.complete(prompt=PROMPT, max_tokens=12, stop_token_ids=[None, ids[place]])
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", ids[place])
    assert body["usage"]["completion_tokens"] == place + 1


async def test_ignore_eos_goes_on_and_min_tokens_keeps_from_ending(stack: Stack) -> None:
    eos = next(iter(stack.services[0].engine.eos_token_ids))
    forced = {"logit_bias": {str(eos): 100}, "max_tokens": 5}
    ended = (await stack.complete(prompt=PROMPT, **forced))["choices"][0]
    assert (ended["text"], ended["finish_reason"], ended["matched_stop"]) == ("", "stop", eos)
    assert await greedy_ids(stack, **forced, ignore_eos=True) == [eos] * 5
    held = await greedy_ids(stack, **forced, min_tokens=3)
    assert (len(held), eos in held[:3]) == (4, False)


async def test_special_tokens_are_shown_where_they_are_not_skipped(stack: Stack) -> None:
    service = stack.services[0]
    eos = next(iter(service.engine.eos_token_ids))
    forced = {"logit_bias": {str(eos): 100}, "max_tokens": 2, "ignore_eos": True}
    assert await text_of(stack, **forced) == ""
    name = service.tokenizer.token_text(eos)
    assert await text_of(stack, **forced, skip_special_tokens=False) == 2 * name
    assert await text_of(stack, **{**forced, "ignore_eos": False}, skip_special_tokens=False) == name


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_seed_gives_the_same_text_and_choices_differ(stack: Stack, stream: bool) -> None:
    body = {"model": "demo", "prompt": PROMPT, "temperature": 1.5, "seed": 42, "n": 3, "max_tokens": 20}
    first = [choice["text"] for choice in (await stack.post(body)).json()["choices"]]
    assert len(set(first)) == 3
    if stream:
        texts = ["", "", ""]
        for chunk in await stack.stream(**body):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == first
    else:
        assert [choice["text"] for choice in (await stack.post(body)).json()["choices"]] == first


async def test_a_dialects_defaults_are_what_is_sampled_with(stack: Stack) -> None:
    body = {"model": "demo", "prompt": PROMPT, "seed": 9, "max_tokens": 20}
    spoken = (await stack.post(body, dialect="llama.cpp")).json()["choices"][0]["text"]
    written_out = {
        "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.1, "repeat_last_n": 64,
        "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    }  # fmt: skip
    assert (await stack.post({**body, **written_out})).json()["choices"][0]["text"] == spoken
