"""vLLM's own parameters and its dialect, through HTTP and the real engine; each works in `union`, too."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import pytest_asyncio

from serve_app.text.tokenizer import TextTokenizer
from tests.flow.stack import Stack, running_stack

PROMPT = "Once upon a time"
LONG = "The quick brown fox jumps over the lazy dog. " * 8
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1) as running:
        yield running


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
BOTH = pytest.mark.parametrize("dialect", ["vllm", "union"])


async def choice_of(stack: Stack, dialect: str = "vllm", **body: Any) -> dict[str, Any]:
    return (await body_of(stack, dialect, **body))["choices"][0]


async def body_of(stack: Stack, dialect: str = "vllm", **body: Any) -> dict[str, Any]:
    sent = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **body}
    response = await stack.post(sent, dialect=dialect)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def refusal_of(stack: Stack, dialect: str = "vllm", **body: Any) -> dict[str, Any]:
    response = await stack.post({"model": "demo", "prompt": PROMPT, "max_tokens": 4, **body}, dialect=dialect)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def tokenizer_of(stack: Stack) -> TextTokenizer:
    return stack.services[0].tokenizer


CONSTRAINED: dict[str, dict[str, Any]] = {
    "guided_json": {"guided_json": PERSON},
    "guided_json as text": {"guided_json": json.dumps(PERSON)},
    "structured json": {"structured_outputs": {"json": PERSON}},
    "guided_regex": {"guided_regex": r"[a-f]{3}-[0-9]{2}"},
    "structured regex": {"structured_outputs": {"regex": r"[a-f]{3}-[0-9]{2}"}},
    "guided_choice": {"guided_choice": ["positive", "negative"]},
    "structured choice": {"structured_outputs": {"choice": ["positive", "negative"]}},
    "guided_grammar": {"guided_grammar": 'root ::= "SELECT " col " from " col\ncol ::= "a" | "b"'},
    "guided_grammar in Lark": {"guided_grammar": 'start: "SELECT " col " from " col\ncol: "a" | "b"'},
    "structured grammar": {"structured_outputs": {"grammar": 'root ::= "SELECT " col " from " col\ncol ::= "a" | "b"'}},
}


def satisfies(kind: str, text: str) -> bool:
    match kind.split()[-1].removeprefix("guided_"):
        case "json" | "text":
            jsonschema.validate(json.loads(text), PERSON)
            return True
        case "regex":
            return len(text) == 6 and set(text[:3]) <= set("abcdef") and text[3] == "-" and text[4:].isdigit()
        case "choice":
            return text in ("positive", "negative")
        case _:
            return text in {f"SELECT {one} from {other}" for one in "ab" for other in "ab"}


@BOTH
@pytest.mark.parametrize("kind", CONSTRAINED)
async def test_each_way_to_constrain_a_text_holds_it_to_what_it_says(stack: Stack, kind: str, dialect: str) -> None:
    choice = await choice_of(stack, dialect, **CONSTRAINED[kind], max_tokens=64, temperature=1, seed=3)
    assert choice["finish_reason"] == "stop"
    assert satisfies(kind, choice["text"]), choice["text"]


async def test_of_choices_one_of_which_begins_like_another_both_can_be_written(stack: Stack) -> None:
    sent = {"guided_choice": ["no", "no way"], "temperature": 2, "n": 16, "seed": 1}
    choices = (await body_of(stack, **sent))["choices"]
    assert {choice["text"] for choice in choices} == {"no", "no way"}


async def test_json_without_white_space_has_none(stack: Stack) -> None:
    sent = {"json": PERSON, "disable_any_whitespace": True}
    text = (await choice_of(stack, structured_outputs=sent, max_tokens=64, temperature=2, seed=1))["text"]
    found = json.loads(text)
    assert text == json.dumps(found, separators=(",", ":"), ensure_ascii=False)


@BOTH
async def test_the_log_probabilities_of_a_prompt_are_those_of_its_echo_with_ranks(stack: Stack, dialect: str) -> None:
    choice = await choice_of(stack, dialect, prompt_logprobs=3, return_token_ids=True)
    echoed = await choice_of(stack, "vllm", echo=True, logprobs=3, max_tokens=0)
    first, *scored = choice["prompt_logprobs"]
    assert first is None
    assert len(scored) == len(choice["prompt_token_ids"]) - 1
    for position, (token_id, by_id) in enumerate(zip(choice["prompt_token_ids"][1:], scored, strict=True), start=1):
        own = by_id[str(token_id)]
        assert own["decoded_token"] == echoed["logprobs"]["tokens"][position]
        assert math.isclose(own["logprob"], echoed["logprobs"]["token_logprobs"][position], abs_tol=1e-4)
        assert next(iter(by_id)) == str(token_id)
        likeliest = sorted(each["logprob"] for each in by_id.values() if each["rank"] <= 3)[::-1]
        assert len(likeliest) == 3
        assert [each["rank"] for each in sorted(by_id.values(), key=lambda e: -e["logprob"])][:3] == [1, 2, 3]
        assert len(by_id) == (3 if own["rank"] <= 3 else 4)
    assert choice["logprobs"] is None


async def test_a_rank_counts_the_tokens_that_are_at_least_as_likely(stack: Stack) -> None:
    """With twenty likeliest tokens given, a token of rank r has r - 1 likelier ones among them."""
    choice = await choice_of(stack, prompt=LONG, prompt_logprobs=20, return_token_ids=True)
    num_checked = 0
    for token_id, by_id in zip(choice["prompt_token_ids"][1:], choice["prompt_logprobs"][1:], strict=True):
        own = by_id[str(token_id)]
        if own["rank"] <= 20:
            assert own["rank"] == 1 + sum(each["logprob"] > own["logprob"] for each in by_id.values())
            num_checked += 1
    assert num_checked > 10


async def test_log_probabilities_of_prompt_and_echo_have_their_own_numbers(stack: Stack) -> None:
    choice = await choice_of(stack, prompt_logprobs=4, echo=True, logprobs=1)
    assert all(len(each) <= 2 for each in choice["logprobs"]["top_logprobs"] if each is not None)
    assert all(len(each) >= 4 for each in choice["prompt_logprobs"] if each is not None)
    assert (await choice_of(stack, prompt_logprobs=0))["prompt_logprobs"][1].keys().__len__() == 1


async def test_a_stream_brings_the_log_probabilities_of_the_prompt_once_per_choice(stack: Stack) -> None:
    whole = await body_of(stack, prompt_logprobs=2, n=2, seed=1)
    events = await stack.stream(prompt=PROMPT, max_tokens=12, prompt_logprobs=2, n=2, seed=1)
    for index in (0, 1):
        own = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert own[0]["prompt_logprobs"] == whole["choices"][index]["prompt_logprobs"]
        assert not any("prompt_logprobs" in choice for choice in own[1:])


@BOTH
async def test_tokens_are_written_as_numbers_where_that_is_asked_for(stack: Stack, dialect: str) -> None:
    sent = {"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = await choice_of(stack, dialect, **sent)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(len(each) == 2 for each in logprobs["top_logprobs"])
    assert all(name.startswith("token_id:") for each in logprobs["top_logprobs"] for name in each)
    named = (await choice_of(stack, dialect, logprobs=2))["logprobs"]
    assert (logprobs["token_logprobs"], logprobs["text_offset"]) == (named["token_logprobs"], named["text_offset"])


@BOTH
async def test_no_token_is_drawn_but_those_allowed(stack: Stack, dialect: str) -> None:
    allowed = [token_id for text in (" the", " a", " cat", ".") for token_id in tokenizer_of(stack).encode_text(text)]
    sent = {"allowed_token_ids": allowed, "temperature": 2, "n": 4, "seed": 5, "return_token_ids": True}
    choices = (await body_of(stack, dialect, **sent))["choices"]
    drawn = {token_id for choice in choices for token_id in choice["token_ids"]}
    assert drawn <= set(allowed)
    assert len(drawn) > 1
    assert all(choice["finish_reason"] == "length" for choice in choices)
    assert (await refusal_of(stack, dialect, allowed_token_ids=[10**6]))["param"] == "allowed_token_ids"


async def test_where_bans_leave_none_of_the_allowed_tokens_the_client_is_told(stack: Stack) -> None:
    error = await refusal_of(stack, allowed_token_ids=[300], logit_bias=[[300, False]])
    assert error["param"] == "allowed_token_ids"
    assert "logit_bias" in error["message"]


@BOTH
async def test_a_bad_word_is_not_written(stack: Stack, dialect: str) -> None:
    """What a greedy text says is banned word by word; each time the word is gone."""
    banned: list[str] = []
    for _ in range(4):
        text = (await choice_of(stack, dialect, bad_words=banned, max_tokens=24))["text"]
        words = [word for word in text.split() if word.isalpha() and len(word) > 3]
        assert not {word.strip() for word in banned} & set(words)
        banned.append(words[0])
    assert len(set(banned)) == 4


@BOTH
async def test_a_prompt_keeps_as_many_tokens_as_are_wanted_of_the_side_that_is_wanted(
    stack: Stack, dialect: str
) -> None:
    whole = (await choice_of(stack, dialect, prompt=LONG, return_token_ids=True))["prompt_token_ids"]
    sent = {"prompt": LONG, "truncate_prompt_tokens": 7, "return_token_ids": True}
    for side, kept in ((None, whole[-7:]), ("left", whole[-7:]), ("right", whole[:7])):
        body = await body_of(stack, dialect, **sent, truncation_side=side)
        assert body["choices"][0]["prompt_token_ids"] == kept
        assert body["usage"]["prompt_tokens_details"]["truncated_tokens"] == len(whole) - 7
    untouched = await body_of(stack, dialect, **{**sent, "truncate_prompt_tokens": len(whole)})
    assert untouched["choices"][0]["prompt_token_ids"] == whole


async def test_a_prompt_of_any_length_fits_beside_its_completion_where_that_is_asked_for(stack: Stack) -> None:
    context = stack.services[0].card.model.max_model_len
    body = await body_of(stack, prompt=[7] * (2 * context), truncate_prompt_tokens=-1, max_tokens=12, ignore_eos=True)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (context - 12, 12)
    assert (await refusal_of(stack, prompt=[7] * (2 * context)))["type"] == "BadRequestError"


async def cached_tokens(stack: Stack, **body: Any) -> int:
    usage = (await body_of(stack, max_tokens=1, **body))["usage"]
    count: int = usage["prompt_tokens_details"]["cached_tokens"]
    return count


@BOTH
async def test_a_prefix_is_found_by_requests_of_its_salt_alone(stack: Stack, dialect: str) -> None:
    prompt = f"{dialect} {LONG}"
    assert await cached_tokens(stack, prompt=prompt, cache_salt="mine") == 0
    found = await cached_tokens(stack, prompt=prompt, cache_salt="mine")
    assert found > 0
    for other in ({"cache_salt": "yours"}, {}, {"cache_salt": "min"}, {"cache_salt": "mine\0"}):
        assert await cached_tokens(stack, prompt=prompt, **other) == 0
        assert await cached_tokens(stack, prompt=prompt, **other) == found
    assert await cached_tokens(stack, prompt=prompt, cache_salt="") == found  # no salt at all
    salted = await choice_of(stack, prompt=prompt, cache_salt="mine")
    assert salted["text"] == (await choice_of(stack, prompt=prompt))["text"]


async def test_a_request_may_name_itself(stack: Stack) -> None:
    body = await body_of(stack, request_id="my-1")
    assert body["id"] == "cmpl-my-1"
    events = await stack.stream(prompt=PROMPT, request_id="my-1")
    assert {event["id"] for event in events} == {"cmpl-my-1"}


async def test_two_requests_of_one_name_are_two(stack: Stack) -> None:
    texts = [(await choice_of(stack, request_id="same", prompt=prompt))["text"] for prompt in (PROMPT, LONG)]
    assert texts == [(await choice_of(stack, prompt=prompt))["text"] for prompt in (PROMPT, LONG)]


@BOTH
async def test_a_priority_is_taken_and_told_as_ignored(stack: Stack, dialect: str) -> None:
    sent = {"model": "demo", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    plain = await stack.post(sent, dialect=dialect)
    urgent = await stack.post({**sent, "priority": -5}, dialect=dialect)
    assert urgent.headers["x-ignored-parameters"] == "priority"
    assert urgent.json()["choices"] == plain.json()["choices"]
    assert "x-ignored-parameters" not in (await stack.post({**sent, "priority": 0}, dialect=dialect)).headers


async def test_a_stop_stays_in_the_text_where_that_is_asked_for(stack: Stack) -> None:
    plain = (await choice_of(stack, max_tokens=24))["text"]
    stop = plain.split()[2]
    cut = await choice_of(stack, max_tokens=24, stop=stop)
    kept = await choice_of(stack, max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert plain.startswith(kept["text"])
    assert kept["text"] == cut["text"] + stop


async def test_vllm_says_what_ended_a_text_but_for_the_models_own_end(stack: Stack) -> None:
    eos = min(stack.services[0].engine.eos_token_ids)
    ends = await choice_of(stack, allowed_token_ids=[eos], max_tokens=4)
    assert (ends["finish_reason"], ends["matched_stop"], ends["stop_reason"]) == ("stop", eos, None)
    token_id = tokenizer_of(stack).encode_text(" the")[0]
    stopped = await choice_of(stack, allowed_token_ids=[token_id], stop_token_ids=[token_id])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", token_id)
    stopped = await choice_of(stack, allowed_token_ids=[token_id], stop=["the"])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "the")
    long = await choice_of(stack, max_tokens=1)
    assert (long["finish_reason"], long["stop_reason"]) == ("length", None)
    assert "stop_reason" not in await choice_of(stack, "union", max_tokens=1)
    events = await stack.post({"model": "demo", "prompt": PROMPT, "max_tokens": 2, "stream": True}, dialect="vllm")
    assert '"stop_reason":null' in events.text


async def test_vllm_says_so_in_chats_too(stack: Stack) -> None:
    chat: dict[str, object] = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}

    async def ended(dialect: str = "vllm", **more: object) -> dict[str, Any]:
        response = await stack.post({**chat, **more}, "/v1/chat/completions", dialect=dialect)
        (choice,) = response.json()["choices"]
        return choice  # type: ignore[no-any-return]

    token_id = tokenizer_of(stack).encode_text(" the")[0]
    only = {"allowed_token_ids": [token_id]}
    assert (await ended(**only, stop_token_ids=[token_id]))["stop_reason"] == token_id
    assert (await ended(**only, stop=["the"]))["stop_reason"] == "the"
    assert (await ended(**only))["stop_reason"] is None
    assert "stop_reason" not in await ended("union")
    sent = {**chat, **only, "stop": ["the"], "stream": True}
    events = (await stack.post(sent, "/v1/chat/completions", dialect="vllm")).text
    assert '"stop_reason":"the"' in events.replace(": ", ":")


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True), ("prompt_embeds", "AAAA"), ("vllm_xargs", {"a": 1}), ("logprob_token_ids", [1]),
        ("guided_choice", []), ("allowed_token_ids", []),
    ],
)  # fmt: skip
async def test_what_is_not_carried_out_is_refused_by_name(stack: Stack, name: str, value: object, dialect: str) -> None:
    error = await refusal_of(stack, dialect, **{name: value})
    assert error["param"] == name
    assert f'"{name}" must be' in error["message"]


async def test_neutral_values_pass_and_change_nothing(stack: Stack) -> None:
    neutral: dict[str, Any] = {
        "use_beam_search": False, "prompt_embeds": None, "vllm_xargs": {}, "guided_json": None, "guided_regex": None,
        "guided_choice": None,
        "guided_grammar": None, "structured_outputs": None, "prompt_logprobs": None, "add_special_tokens": True,
        "allowed_token_ids": None, "bad_words": [], "truncate_prompt_tokens": None, "truncation_side": None,
        "return_tokens_as_token_ids": None, "return_token_ids": None, "priority": 0, "cache_salt": None,
        "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "thinking_token_budget": -1,
        "guided_decoding_backend": "auto", "stop_token_ids": [], "ignore_eos": False, "logits_processors": None,
        "kv_transfer_params": {"do_remote_decode": True}, "length_penalty": 1.2, "early_stopping": True,  # no beams
    }  # fmt: skip
    assert (await body_of(stack, **neutral))["choices"] == (await body_of(stack))["choices"]


async def test_an_unknown_name_is_ignored_and_told_and_a_misspelled_one_refused(stack: Stack) -> None:
    sent = {"model": "demo", "prompt": PROMPT, "max_tokens": 1, "documents": ["x"]}
    response = await stack.post(sent, dialect="vllm")
    assert (response.status_code, response.headers["x-ignored-parameters"]) == (200, "documents")
    assert "prompt_logprobs" in (await refusal_of(stack, prompt_logprob=1))["message"]


async def test_errors_have_vllms_form(stack: Stack) -> None:
    error = await refusal_of(stack, temperature=3)
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, "temperature")
    response = await stack.post({"model": "nobody", "prompt": PROMPT}, dialect="vllm")
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (404, "NotFoundError", 404)


async def test_vllms_limits_are_its_own(stack: Stack) -> None:
    top = (await choice_of(stack, logprobs=20, max_tokens=1))["logprobs"]["top_logprobs"][0]
    assert len(top) == 20
    assert (await refusal_of(stack, logprobs=21))["param"] == "logprobs"
    assert (await refusal_of(stack, prompt_logprobs=21))["param"] == "prompt_logprobs"
    assert (await refusal_of(stack, stream_options={"include_usage": True}))["param"] == "stream_options"
    assert (await refusal_of(stack, cache_salt="s" * 1025))["param"] == "cache_salt"


RECORDED: dict[str, Any] = {
    "model": "demo",
    "prompt": "Extract the person: Ada Lovelace is 36 years old.\n",
    "max_tokens": 64,
    "temperature": 0.7,
    "seed": 42,
    "logprobs": 2,
    "extra_body": {
        "guided_json": PERSON, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "min_tokens": 4,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
        "add_special_tokens": True, "truncate_prompt_tokens": 128, "prompt_logprobs": 1, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "bad_words": ["Bob"], "request_id": "extract-7", "priority": 0,
        "cache_salt": "c2FsdA==", "stop_token_ids": [], "use_beam_search": False, "length_penalty": 1.0,
    },
}  # fmt: skip
"""As a client of vLLM sends it: OpenAI's library, and what is vLLM's own in `extra_body`."""


async def test_a_recorded_request_of_a_client_of_vllm_is_answered(stack: Stack) -> None:
    transport = httpx.ASGITransport(app=stack.app)
    headers = {"X-Completions-Dialect": "vllm"}
    async with httpx.AsyncClient(transport=transport, base_url="http://flow", headers=headers) as http:
        client = openai.AsyncOpenAI(api_key="none", base_url="http://flow/v1", http_client=http)
        answer = await client.completions.create(**RECORDED)
        stream = await client.completions.create(**RECORDED, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    choice = answer.choices[0]
    jsonschema.validate(json.loads(choice.text), PERSON)
    assert (answer.id, choice.finish_reason) == ("cmpl-extract-7", "stop")
    extra = choice.model_extra or {}
    assert {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"} <= extra.keys()
    assert len(extra["prompt_logprobs"]) == len(extra["prompt_token_ids"]) == answer.usage.prompt_tokens
    assert choice.logprobs.tokens == [f"token_id:{token_id}" for token_id in extra["token_ids"]]
    streamed = [each for chunk in chunks for each in chunk.choices]
    assert "".join(each.text for each in streamed) == choice.text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
