"""Where tokens stand in the text that is shown: `text_offset`, of prompt and completion, whole and streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.flow.stack import Stack, running_stack

LEAD, COLON, END, USER = 168, 31, 5, 373
"""A byte that begins a character of three bytes, `:`, `<|im_end|>` and `user`."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1) as running:
        yield running


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


async def placed(stack: Stack, **body: Any) -> tuple[str, list[tuple[str, int]]]:
    """The text, and each token with its offset; that a stream gives the same is checked."""
    body = {"logprobs": 0, "max_tokens": 0, **body}
    choice = (await stack.complete(**body))["choices"][0]
    logprobs = choice["logprobs"]
    text, offsets = "", []
    for chunk in await stack.stream(**body):
        for part in chunk["choices"]:
            text += part["text"]
            offsets += (part["logprobs"] or {}).get("text_offset", [])
    assert (text, offsets) == (choice["text"], logprobs["text_offset"])
    return choice["text"], list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))


async def test_what_follows_a_broken_character_of_a_prompt_stands_behind_its_sign(stack: Stack) -> None:
    text, places = await placed(stack, prompt=[LEAD, COLON, COLON], echo=True)
    assert text == "\ufffd::"
    assert places == [("bytes:\\xe6", 0), (":", 1), (":", 2)]


async def test_so_it_does_in_a_completion(stack: Stack) -> None:
    body = {"prompt": [COLON], "allowed_token_ids": [LEAD, COLON], "logit_bias": {str(LEAD): 10}}
    text, places = await placed(stack, **body, temperature=1, seed=3, max_tokens=10)
    assert "\ufffd:" in text
    assert [text[place] for token, place in places if token == ":"] == [":"] * text.count(":")


async def test_what_is_shown_of_it_ends_with_a_stop_that_breaks_a_character(stack: Stack) -> None:
    body = {"prompt": [COLON], "allowed_token_ids": [LEAD, COLON], "logit_bias": {str(LEAD): 10}}
    text, places = await placed(stack, **body, temperature=1, seed=3, max_tokens=10, stop=":")
    assert set(text) == {"\ufffd"}
    assert places == [("bytes:\\xe6", place) for place in range(len(text))]


async def test_a_character_that_is_cut_off_is_in_no_offset(stack: Stack) -> None:
    text, places = await placed(stack, prompt="é😀é x", echo_last=5)
    assert text == "é x"
    assert places == [("bytes:\\x98", 0), ("bytes:\\x80", 0), ("bytes:\\xc3", 0), ("bytes:\\xa9", 0), (" x", 1)]


async def test_a_special_token_that_is_written_in_a_prompt_is_counted_by_its_name(stack: Stack) -> None:
    text, places = await placed(stack, prompt="a <|im_end|> b c", echo=True, max_tokens=2)
    assert text.startswith("a <|im_end|> b c")
    assert places[:5] == [("a", 0), (" ", 1), ("<|im_end|>", 2), (" b", 12), (" c", 14)]
    assert all(text.startswith(token, place) for token, place in places)
    assert places[5][1] == 16


async def test_an_echo_of_token_ids_shows_special_ones_where_they_are_not_skipped(stack: Stack) -> None:
    body = {"prompt": [END, USER], "echo": True, "max_tokens": 1, "logit_bias": {str(END): 100}, "ignore_eos": True}
    assert await placed(stack, **body) == ("user", [("<|im_end|>", 0), ("user", 0), ("<|im_end|>", 4)])
    text, places = await placed(stack, **body, skip_special_tokens=False)
    assert text == "<|im_end|>user<|im_end|>"
    assert places == [("<|im_end|>", 0), ("user", 10), ("<|im_end|>", 14)]
