"""The end of the context (docs/contract.md#length-and-context), and who decides the dialect, with the real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from serve_app.api.dialects import DIALECTS
from serve_app.router.router import RouterConfig
from tests.flow.stack import Stack, running_stack

CONTEXT = 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, max_model_len=CONTEXT) as running:
        yield running


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def ids(count: int) -> list[int]:
    return [100 + i % 50 for i in range(count)]


async def post(stack: Stack, dialect: str | None = None, **body: Any) -> tuple[int, dict[str, Any]]:
    response = await stack.post({"model": "demo", "temperature": 0, "ignore_eos": True, **body}, dialect=dialect)
    return response.status_code, response.json()


async def test_a_completion_ends_with_the_context(stack: Stack) -> None:
    status, body = await post(stack, prompt=ids(60), max_tokens=16)
    assert (status, body["usage"]["completion_tokens"]) == (200, 4)
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_completion_that_would_not_fit_is_refused_where_that_was_asked_for(stack: Stack) -> None:
    status, body = await post(stack, prompt=ids(60), n_predict=5, context_length_exceeded_behavior="error")
    assert (status, body["error"]["param"]) == (400, "n_predict")
    assert '"n_predict" must be at most 4' in body["error"]["message"]
    assert (body["error"]["n_prompt_tokens"], body["error"]["n_ctx"]) == (60, CONTEXT)
    status, _ = await post(stack, prompt=ids(60), max_tokens=4, context_length_exceeded_behavior="error")
    assert status == 200


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_overflow_is_what_the_dialect_makes_of_it(stack: Stack, dialect: str) -> None:
    status, _ = await post(stack, dialect, prompt=ids(60), max_tokens=16)
    refuses = DIALECTS[dialect].defaults.get("context_length_exceeded_behavior") == "error"
    assert status == (400 if refuses else 200)


@pytest.mark.parametrize("dialect", ["mistral.rs", "llama.cpp", "omlx"])
async def test_the_dialects_own_default_generates_to_the_end_of_the_context(stack: Stack, dialect: str) -> None:
    _, body = await post(stack, dialect, prompt=ids(40))
    assert body["usage"]["completion_tokens"] == CONTEXT - 40


@pytest.mark.parametrize("count", [CONTEXT, CONTEXT + 1, 200])
async def test_a_prompt_that_leaves_no_room_is_refused(stack: Stack, count: int) -> None:
    status, body = await post(stack, prompt=ids(count), max_tokens=1)
    assert (status, body["error"]["type"]) == (400, "exceed_context_size_error")
    assert "truncate_sequence" in body["error"]["message"]


KEPT = [(10, 54), (1, 63), (0, 64), (40, 32), (64, 32), (1000, 32), (-1, 32)]


@pytest.mark.parametrize(("max_tokens", "kept"), KEPT)
async def test_a_truncated_prompt_keeps_its_end_and_half_the_context(stack: Stack, max_tokens: int, kept: int) -> None:
    sent = ids(200)
    status, body = await post(stack, prompt=sent, max_tokens=max_tokens, truncate_sequence=True, return_token_ids=True)
    assert status == 200
    assert body["choices"][0]["prompt_token_ids"] == sent[-kept:]
    assert body["usage"]["prompt_tokens"] == kept
    assert body["usage"]["prompt_tokens_details"]["truncated_tokens"] == 200 - kept
    assert body["usage"]["completion_tokens"] == (min(max_tokens, CONTEXT - kept) if max_tokens >= 0 else 32)


@pytest.mark.parametrize("count", [CONTEXT, CONTEXT + 1, 200])
@pytest.mark.parametrize(
    ("dialect", "path", "body"),
    [
        ("mistral.rs", "/v1/completions", {"truncate_sequence": True}),
        ("llama.cpp", "/v1/completions", {"truncate_sequence": True}),
        ("llama.cpp", "/completion", {"truncate_prompt_tokens": -1}),
        ("vllm", "/v1/chat/completions", {"truncate_sequence": True}),
        ("openai", "/v1/chat/completions", {"truncate_prompt_tokens": -1}),
    ],
)
async def test_a_cut_prompt_leaves_a_completion_without_a_limit_half_the_context(
    stack: Stack, count: int, dialect: str, path: str, body: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"prompt": ids(count)}
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": "so " * count}]}
    sent = {"model": "demo", "ignore_eos": True, **asked, **body}
    told = (await stack.post(sent, path, dialect=dialect)).json()
    prompt, completion = (
        (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"])
        if "usage" in told
        else (told["tokens_evaluated"], told["tokens_predicted"])
    )
    assert (prompt, completion) == (CONTEXT // 2, CONTEXT // 2)


async def test_a_completion_that_must_not_be_shortened_may_take_more_than_half_of_the_context(stack: Stack) -> None:
    whole = {"truncate_sequence": True, "context_length_exceeded_behavior": "error", "return_token_ids": True}
    _, body = await post(stack, prompt=ids(200), max_tokens=60, **whole)
    assert body["choices"][0]["prompt_token_ids"] == ids(200)[-4:]
    assert body["usage"]["completion_tokens"] == 60
    status, body = await post(stack, prompt=ids(200), max_tokens=64, **whole)
    assert (status, body["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_cut_of_the_prompts_is_told_in_a_header_and_in_the_usage(stack: Stack, stream: bool) -> None:
    body = {"model": "demo", "prompt": ids(200), "max_tokens": 4, "truncate_sequence": True, "stream": stream}
    response = await stack.post({**body, "stream_options": {"include_usage": True}})
    assert response.headers["x-truncated-prompt-tokens"] == "140"
    assert '"truncated_tokens":140' in response.text.replace(" ", "")
    fits = await stack.post({**body, "prompt": ids(20)})
    assert "x-truncated-prompt-tokens" not in fits.headers
    assert "truncated_tokens" not in fits.text


async def test_a_prompt_that_fits_is_not_truncated(stack: Stack) -> None:
    _, body = await post(stack, prompt=ids(60), max_tokens=16, truncate_sequence=True)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (60, 4)


async def test_an_echo_shows_what_is_left_of_a_truncated_prompt(stack: Stack) -> None:
    text = "one two three four five six seven eight nine ten " * 20
    _, body = await post(stack, prompt=text, max_tokens=4, truncate_sequence=True, echo=True, logprobs=0)
    choice = body["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == CONTEXT
    assert not choice["text"].startswith(text[:100])
    assert choice["text"][:20] in text


async def test_a_models_dialect_beats_the_services_and_the_header_beats_both() -> None:
    settings = RouterConfig(dialect=DIALECTS["openai"])
    async with running_stack(num_replicas=1, config=settings, dialect="sglang", max_model_len=CONTEXT) as stack:
        own = await stack.post({"model": "demo", "prompt": "x", "temperature": 9})
        assert (own.headers["x-completions-dialect"], own.json()["object"]) == ("sglang", "error")
        adapter = await stack.post({"model": "demo:json", "prompt": "x", "max_tokens": 1})
        assert adapter.headers["x-completions-dialect"] == "sglang"
        nobody = await stack.post({"model": "nobody", "prompt": "x"})
        assert nobody.headers["x-completions-dialect"] == "openai"
        broken = await stack.post({"model": 5, "prompt": "x"}, dialect="mistral.rs")
        assert (broken.status_code, set(broken.json())) == (422, {"message"})
        listing = (await stack.get("/v1/dialects")).json()
        assert (listing["default"], listing["models"]) == ("openai", {"demo": "sglang"})


async def test_what_is_too_long_by_its_length_alone_is_carried_to_no_replica(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = stack.services[0].card.model
    assert card.prompt_length is not None
    most = CONTEXT * (card.prompt_length.chars_per_token or 0)

    async def submit(router_id: str, requests: object) -> None:
        raise AssertionError("it was carried there")

    monkeypatch.setattr(stack.services[0], "submit", submit)
    status, body = await post(stack, prompt="word" * most)
    assert (status, body["error"]["type"]) == (400, "exceed_context_size_error")
    assert body["error"]["max_prompt_chars"] == most
    assert f"of which at most {most} can fit the context of demo" in body["error"]["message"]
    status, body = await post(stack, prompt="word", max_tokens=1)
    assert status == 503, "what may fit is carried there, and no replica takes it"
