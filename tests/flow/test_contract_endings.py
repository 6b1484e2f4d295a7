"""How a completion ends (docs/contract.md#how-a-text-ends): its last token is counted and scored; what stops a text."""

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


async def choice_of(stack: Stack, **body: Any) -> dict[str, Any]:
    choice: dict[str, Any] = (await stack.complete(**{"prompt": PROMPT, "max_tokens": 30, **body}))["choices"][0]
    return choice


async def streamed_logprobs(stack: Stack, **body: Any) -> dict[str, list[Any]]:
    chunks = await stack.stream(**{"prompt": PROMPT, "max_tokens": 30, **body})
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    return joined


def eos_of(stack: Stack) -> int:
    return min(stack.services[0].engine.eos_token_ids)


def name_of(stack: Stack, token_id: int) -> str:
    return stack.services[0].tokenizer.token_text(token_id)


@pytest.mark.parametrize("echo", [False, True])
async def test_the_end_token_has_its_entry_and_its_text_stays_out(stack: Stack, echo: bool) -> None:
    eos = eos_of(stack)
    body = {"logit_bias": {str(eos): 100}, "max_tokens": 1, "logprobs": 1, "echo": echo}
    response = await stack.complete(prompt=PROMPT, **body)
    choice = response["choices"][0]
    assert (choice["text"], choice["matched_stop"]) == (PROMPT if echo else "", eos)
    logprobs = choice["logprobs"]
    num_prompt = response["usage"]["prompt_tokens"] if echo else 0
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(logprobs, num_prompt + 1)
    assert logprobs["tokens"][-1] == name_of(stack, eos)
    assert logprobs["token_logprobs"][-1] < 0
    assert logprobs["text_offset"][-1] == len(choice["text"])
    assert await streamed_logprobs(stack, **body) == logprobs


async def test_all_tokens_but_the_last_of_a_scored_text_are_its_own(stack: Stack) -> None:
    """What lm-eval reads: rows from the context's length to the last but one, whether the model ends there or not."""
    eos = eos_of(stack)
    alone = await stack.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    expected = alone["choices"][0]["logprobs"]["token_logprobs"]
    for forced in ({}, {"logit_bias": {str(eos): 100}}):
        scored = await stack.complete(prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, **forced)
        assert scored["choices"][0]["logprobs"]["token_logprobs"][:-1] == pytest.approx(expected, abs=1e-6)


async def test_there_is_an_entry_for_every_token_that_is_counted(stack: Stack) -> None:
    prompt = "Question: What is the capital of France?\nAnswer:"
    response = await stack.complete(prompt=prompt, max_tokens=200, logprobs=0)
    choice = response["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == response["usage"]["completion_tokens"]
    assert await streamed_logprobs(stack, prompt=prompt, max_tokens=200, logprobs=0) == choice["logprobs"]


async def test_a_stop_token_is_scored_and_shown_only_where_stops_are_kept(stack: Stack) -> None:
    plain = await choice_of(stack, return_token_ids=True, logprobs=0)
    place = plain["token_ids"].index(plain["token_ids"][6])
    stop = plain["token_ids"][place]
    piece = plain["logprobs"]["tokens"][place]
    trimmed = await choice_of(stack, stop_token_ids=[stop], logprobs=0)
    kept = await choice_of(stack, stop_token_ids=[stop], logprobs=0, no_stop_trim=True)
    assert kept["text"] == trimmed["text"] + piece
    assert plain["text"].startswith(kept["text"])
    assert (trimmed["matched_stop"], kept["matched_stop"]) == (stop, stop)
    assert trimmed["logprobs"] == kept["logprobs"]
    assert trimmed["logprobs"]["tokens"] == plain["logprobs"]["tokens"][: place + 1]
    assert trimmed["logprobs"]["text_offset"][-1] == len(trimmed["text"])
    streamed = await stack.stream(prompt=PROMPT, max_tokens=30, stop_token_ids=[stop], no_stop_trim=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == kept["text"]


async def test_keeping_stops_does_not_show_the_models_end_token(stack: Stack) -> None:
    forced = {"logit_bias": {str(eos_of(stack)): 100}, "no_stop_trim": True}
    assert (await choice_of(stack, **forced))["text"] == ""


async def test_an_expression_for_the_end_of_the_text_stops_where_the_text_has_got_to(stack: Stack) -> None:
    plain = await choice_of(stack, max_tokens=60, return_token_ids=True, logprobs=0, ignore_eos=True)
    pieces = plain["logprobs"]["tokens"]
    place = next(i for i, piece in enumerate(pieces) if piece.strip() == ".")
    cut = await choice_of(stack, max_tokens=60, ignore_eos=True, stop_regex=r"[.!?]\s*$", no_stop_trim=True)
    assert (cut["finish_reason"], cut["matched_stop"]) == ("stop", r"[.!?]\s*$")
    assert cut["text"] == "".join(pieces[: place + 1])


async def test_a_stop_token_outside_the_vocabulary_is_refused(stack: Stack) -> None:
    vocab_size = stack.services[0].card.model.vocab_size
    body = {"model": "demo", "prompt": PROMPT, "stop_token_ids": [5, vocab_size]}
    response = await stack.post(body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stop_token_ids")
    message = response.json()["error"]["message"]
    assert message.startswith(f'"stop_token_ids" must hold token ids from 0 to {vocab_size - 1}')
    assert message.endswith(f"found {vocab_size}.")
    assert (await stack.post({**body, "stop_token_ids": [vocab_size - 1], "max_tokens": 1})).status_code == 200


async def test_a_text_ends_before_a_line_that_is_indented_by_less(stack: Stack) -> None:
    """The lines come from a grammar, so that their indents are known."""
    lines = "a\\n    b\\n      c\\n  d\\ne"
    held = {"grammar": f'root ::= "{lines}"', "max_tokens": 40}
    for least, expected in (
        (0, "a\n    b\n      c\n  d\ne"),
        (4, "a\n    b\n      c"),
        (5, "a"),
        (2, "a\n    b\n      c\n  d"),
    ):
        choice = await choice_of(stack, **held, n_indent=least)
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        streamed = await stack.stream(prompt=PROMPT, **held, n_indent=least)
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == expected


async def test_a_text_whose_time_is_over_ends_with_a_line(stack: Stack) -> None:
    held = {"grammar": 'root ::= "a\\nb\\nc\\nd\\ne"', "max_tokens": 40}
    assert (await choice_of(stack, **held, t_max_predict_ms=600_000))["text"] == "a\nb\nc\nd\ne"
    assert (await choice_of(stack, **held, t_max_predict_ms=0))["text"] == "a\nb\nc\nd\ne"
