"""A suffix (docs/contract.md#a-suffix): filled before or appended, streamed or not, echoed, cut; and /infill."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from serve_app.api.dialects import DIALECTS
from tests.flow.stack import Stack, running_stack

CONTEXT = 256
PREFIX, SUFFIX = "def add_three(number):\n", "\n\n\ndef add_four(number):\n    return number + 4\n"
PRE, SUF, MID = 1, 2, 3
APPENDING = ("mistral.rs", "sglang")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, max_model_len=CONTEXT) as running:
        yield running


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def ids(stack: Stack, text: str) -> list[int]:
    return list(stack.services[0].tokenizer.encode_literal(text))


def gap_ids(stack: Stack, prefix: str = PREFIX, suffix: str = SUFFIX) -> list[int]:
    return [PRE, *ids(stack, prefix), SUF, *ids(stack, suffix), MID]


async def choice_of(stack: Stack, **body: Any) -> dict[str, Any]:
    response = await stack.complete(**{"prompt": PREFIX, "max_tokens": 12, **body})
    choice: dict[str, Any] = response["choices"][0]
    return choice


async def told(stack: Stack, dialect: str | None = None, **body: Any) -> httpx.Response:
    sent = {"model": "demo", "prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 4, "temperature": 0, **body}
    return await stack.post(sent, dialect=dialect)


async def test_a_gap_is_told_to_the_model_between_its_own_tokens(stack: Stack) -> None:
    filled = await stack.complete(prompt=PREFIX, suffix=SUFFIX, max_tokens=12, return_token_ids=True)
    choice, expected = filled["choices"][0], gap_ids(stack)
    assert choice["prompt_token_ids"] == expected
    assert filled["usage"]["prompt_tokens"] == len(expected)
    plain = await choice_of(stack, prompt=expected)
    assert (choice["text"], choice["finish_reason"]) == (plain["text"], plain["finish_reason"])
    assert choice["text"] != (await choice_of(stack))["text"]


async def test_an_appended_suffix_is_the_end_of_the_text_and_nothing_else(stack: Stack) -> None:
    plain = await stack.complete(prompt=PREFIX, max_tokens=12)
    appended = await stack.complete(prompt=PREFIX, suffix=SUFFIX, suffix_mode="append", max_tokens=12)
    assert appended["choices"][0] == plain["choices"][0] | {"text": plain["choices"][0]["text"] + SUFFIX}
    assert _without_cached(appended["usage"]) == _without_cached(plain["usage"])


def _without_cached(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_mode_is_the_dialects_and_is_told_before_the_text(stack: Stack, dialect: str, stream: bool) -> None:
    usual = await told(stack, dialect, stream=stream)
    assert usual.headers["x-suffix-mode"] == ("append" if dialect in APPENDING else "fim")
    for mode in ("fim", "append"):
        assert (await told(stack, dialect, stream=stream, suffix_mode=mode)).headers["x-suffix-mode"] == mode
    for nothing in (None, ""):
        assert "x-suffix-mode" not in (await told(stack, dialect, suffix=nothing, suffix_mode="append")).headers


@pytest.mark.parametrize("mode", ["fim", "append"])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("num", [1, 2])
async def test_a_stream_adds_up_to_the_response(stack: Stack, mode: str, echo: bool, num: int) -> None:
    body = {"prompt": [PREFIX, "def f("], "n": num, "suffix": SUFFIX, "suffix_mode": mode, "echo": echo, "logprobs": 1}
    whole = await stack.complete(**body, max_tokens=6, return_token_ids=True)
    chunks = await stack.stream(**body, max_tokens=6, return_token_ids=True)
    for choice in whole["choices"]:
        of_choice = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in of_choice) == choice["text"]
        assert [each["finish_reason"] for each in of_choice][-1] == choice["finish_reason"]
        assert [token_id for each in of_choice for token_id in each.get("token_ids", [])] == choice["token_ids"]
        offsets = [offset for each in of_choice for offset in (each["logprobs"] or {}).get("text_offset", [])]
        assert offsets == choice["logprobs"]["text_offset"]
        if mode == "append" or echo:
            assert of_choice[-1]["text"] == ""
            assert of_choice[-2]["text"].endswith(SUFFIX)


async def test_one_suffix_stands_behind_every_prompt(stack: Stack) -> None:
    prompts: list[Any] = [PREFIX, "def square(x", ids(stack, "def total(")]
    together = await stack.complete(prompt=prompts, suffix=SUFFIX, max_tokens=8, n=2, seed=1)
    alone = [await stack.complete(prompt=prompt, suffix=SUFFIX, max_tokens=8) for prompt in prompts]
    texts = [choice["text"] for choice in together["choices"]]
    assert texts[::2] == texts[1::2] == [each["choices"][0]["text"] for each in alone]
    assert together["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)


@pytest.mark.parametrize("prompt", [PREFIX, "ids", "mixed"])
@pytest.mark.parametrize("mode", ["fim", "append"])
async def test_an_echo_is_prompt_completion_suffix(stack: Stack, prompt: Any, mode: str) -> None:
    sent = {"ids": ids(stack, PREFIX), "mixed": [*ids(stack, "def add"), "_three(number):\n"]}.get(prompt, prompt)
    body = {"prompt": sent, "suffix": SUFFIX, "suffix_mode": mode, "max_tokens": 6}
    text = (await choice_of(stack, **body))["text"].removesuffix(SUFFIX if mode == "append" else "")
    echoed = await choice_of(stack, **body, echo=True, logprobs=1)
    assert echoed["text"] == PREFIX + text + SUFFIX
    tokens, offsets = echoed["logprobs"]["tokens"], echoed["logprobs"]["text_offset"]
    num_prompt = len(ids(stack, PREFIX)) if prompt != "mixed" else len(sent) - 1 + len(ids(stack, "_three(number):\n"))
    assert "".join(tokens[:num_prompt]) == PREFIX
    assert offsets[0] == 0
    assert offsets[num_prompt] == len(PREFIX)
    assert all(echoed["text"].startswith(token, at) for token, at in zip(tokens[:-1], offsets, strict=False))
    last = await choice_of(stack, **body, echo_last=2)
    assert last["text"] == "".join(tokens[num_prompt - 2 : num_prompt]) + text + (SUFFIX if mode == "append" else "")


async def test_log_probabilities_of_a_prefix_are_those_behind_its_marker(stack: Stack) -> None:
    """The prompt that was computed begins with a marker, so that its first shown token is predicted, too."""
    body = {"max_tokens": 0, "echo": True, "logprobs": 1}
    shown = (await choice_of(stack, suffix=SUFFIX, **body))["logprobs"]["token_logprobs"]
    whole = (await choice_of(stack, prompt=gap_ids(stack), **body))["logprobs"]["token_logprobs"]
    assert shown == pytest.approx(whole[1 : 1 + len(shown)], abs=1e-5)


async def test_what_does_not_fit_is_cut_on_both_sides(stack: Stack) -> None:
    prefix, suffix = ids(stack, "red blue " * 200), "green pink " * 200
    body = {"prompt": prefix, "suffix": suffix, "max_tokens": 16}
    refused = await stack.post({"model": "demo", **body})
    assert refused.status_code == 400
    assert refused.json()["error"]["error_code"] == "context_length_exceeded"
    cut = await stack.complete(**body, truncate_sequence=True, return_token_ids=True)
    room = CONTEXT - 16 - 3
    num_suffix = room // 4
    kept = [PRE, *prefix[num_suffix - room :], SUF, *ids(stack, suffix)[:num_suffix], MID]
    assert cut["choices"][0]["prompt_token_ids"] == kept
    total = len(prefix) + len(ids(stack, suffix)) + 3
    assert cut["usage"]["prompt_tokens_details"]["truncated_tokens"] == total - len(kept)
    echoed = await stack.complete(**body, truncate_sequence=True, echo=True)
    shown = stack.services[0].tokenizer.decode(kept[1 : 1 + room - num_suffix])
    assert echoed["choices"][0]["text"] == shown + cut["choices"][0]["text"] + suffix


async def test_an_appended_suffix_takes_no_room(stack: Stack) -> None:
    response = await told(stack, suffix="x" * 100_000, suffix_mode="append")
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"].endswith("x" * 100_000)


@pytest.mark.parametrize(
    ("change", "param"),
    [({"suffix": 5}, "suffix"), ({"suffix": ["a"]}, "suffix"), ({"suffix_mode": "FIM"}, "suffix_mode")],
)
async def test_what_is_no_suffix_is_refused(stack: Stack, change: dict[str, Any], param: str) -> None:
    response = await told(stack, **change)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_best_of_is_among_texts_in_the_gap(stack: Stack) -> None:
    ranked = await stack.complete(prompt=PREFIX, suffix=SUFFIX, max_tokens=6, n=1, best_of=3, seed=2, temperature=1)
    assert ranked["usage"]["prompt_tokens"] == len(gap_ids(stack))
    appended = await choice_of(stack, suffix=SUFFIX, suffix_mode="append", n=1, best_of=3, seed=2, temperature=1)
    assert appended["text"].endswith(SUFFIX)


async def test_a_gap_is_cached_and_its_adapters_apply(stack: Stack) -> None:
    body = {"prompt": PREFIX * 3, "suffix": SUFFIX, "max_tokens": 8}
    first = await stack.complete(**body)
    again = await stack.complete(**body)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    shouted = await stack.complete(**{**body, "model": "demo:shout"})
    assert shouted["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]


INFILL = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 12, "temperature": 0, "repeat_penalty": 1}


async def test_infill_is_the_same_gap_in_llama_cpps_shape(stack: Stack) -> None:
    response = await stack.post(INFILL, "/infill")
    assert (response.status_code, response.headers["x-suffix-mode"]) == (200, "fim")
    result = response.json()
    filled = await choice_of(stack, suffix=SUFFIX)
    assert (result["content"], result["tokens_evaluated"]) == (filled["text"], len(gap_ids(stack)))
    assert (result["stop"], result["prompt"]) == (True, PREFIX)
    streamed = await stack.post({**INFILL, "stream": True}, "/infill")
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["x-suffix-mode"] == "fim"


async def test_infill_reads_files_before_and_an_opening_behind(stack: Stack) -> None:
    extra = [{"filename": "a.py", "text": "x = 1\n"}, {"text": "y = 2\n"}]
    response = await stack.post({**INFILL, "input_extra": extra, "prompt": "    return"}, "/infill")
    snippet = "\n\n--- snippet ---\n\n"
    files = [token_id for text in ("x = 1\n", "y = 2\n") for part in (snippet, text) for token_id in ids(stack, part)]
    expected = [*files, *gap_ids(stack), *ids(stack, "    return")]
    plain = await choice_of(stack, prompt=expected)
    result = response.json()
    assert (result["content"], result["tokens_evaluated"]) == (plain["text"], len(expected))


async def test_infill_takes_what_fits_of_whole_files(stack: Stack) -> None:
    extra = [{"filename": "a.py", "text": "x = 1\n" * 500}]
    body = {**INFILL, "input_prefix": "red " * 1000, "input_suffix": "blue " * 1000, "input_extra": extra}
    result = (await stack.post(body, "/infill")).json()
    assert (result["truncated"], result["tokens_evaluated"]) == (True, CONTEXT - 12)
    refused = await stack.post({**body, "truncate_sequence": False}, "/infill")
    assert refused.json()["error"]["error_code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("change", "param"),
    [({"input_suffix": None}, "input_suffix"), ({"input_extra": [{}]}, "input_extra[0]"), ({"best_of": 1}, "best_of")],
)
async def test_what_is_no_infill_is_refused(stack: Stack, change: dict[str, Any], param: str) -> None:
    response = await stack.post({**INFILL, **change}, "/infill")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
