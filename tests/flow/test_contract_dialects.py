"""What each dialect's own clients meet, with the real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.flow.stack import Stack, running_stack

PROMPT = "Once upon a time"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1) as running:
        yield running


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


async def text_of(stack: Stack, dialect: str = "union", **body: Any) -> str:
    sent = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **body}
    response = await stack.post(sent, dialect=dialect)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def send(stack: Stack, content: bytes, dialect: str) -> httpx.Response:
    headers = {"X-Completions-Dialect": dialect, "content-type": "application/json"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=stack.app), base_url="http://flow") as client:
        return await client.post("/v1/completions", content=content, headers=headers)


async def test_mistral_rs_answers_who_names_no_model_with_the_only_one(stack: Stack) -> None:
    sent = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "top_p": 1}
    response = await stack.post(sent, dialect="mistral.rs")
    assert (response.status_code, response.json()["model"]) == (200, "default")
    assert response.json()["choices"][0]["text"] == await text_of(stack, max_tokens=4)
    assert (await stack.post(sent, dialect="union")).status_code == 400


@pytest.mark.parametrize(
    ("content", "status"), [(b'{"prompt": ', 400), (b"\xff", 400), (b'{"prompt": 5}', 422), (b"[]", 422)]
)
async def test_mistral_rs_tells_broken_json_from_wrong_values(stack: Stack, content: bytes, status: int) -> None:
    response = await send(stack, content, "mistral.rs")
    assert (response.status_code, set(response.json())) == (status, {"message"})
    assert (await send(stack, content, "union")).status_code == 400


async def test_tools_that_are_not_to_be_used_change_no_text(stack: Stack) -> None:
    plain = await text_of(stack, "mistral.rs")
    assert await text_of(stack, "mistral.rs", tools=[TOOL], tool_choice="none") == plain


async def test_the_penalties_of_omlx_see_the_output_alone(stack: Stack) -> None:
    """The first token has no output before it: no penalty can move what it is drawn from, whatever the prompt holds."""

    async def drawn_from(**penalty: Any) -> Any:
        body = {"model": "demo", "prompt": "red and red and red and", "seed": 1, "max_tokens": 1, "top_p": 1}
        response = await stack.post({**body, "logprobs": 5, "post_sampling_probs": True, **penalty}, dialect="omlx")
        return response.json()["choices"][0]["logprobs"]["top_logprobs"]

    plain = await drawn_from()
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 2.0}):
        assert await drawn_from(**penalty) == plain
        assert await drawn_from(**penalty, repeat_last_n=64) != plain


async def test_the_codes_of_openai_are_words(stack: Stack) -> None:
    for model, code in (("nobody", "model_not_found"), ("demo:nobody", "adapter_not_found")):
        response = await stack.post({"model": model, "prompt": PROMPT}, dialect="openai")
        assert (response.status_code, response.json()["error"]["code"]) == (404, code)
    options = {"include_usage": True, "include_obfuscation": False}
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1, "stream": True, "stream_options": options}
    assert (await stack.post(body, dialect="openai")).status_code == 200


@pytest.mark.parametrize("dialect", ["union", "fireworks", "openai", "sglang"])
async def test_a_top_p_of_0_leaves_the_likeliest_token(stack: Stack, dialect: str) -> None:
    greedy = await text_of(stack, dialect)
    assert await text_of(stack, dialect, temperature=1, top_p=0) == greedy


async def test_a_repetition_penalty_of_0_rewards_repetition(stack: Stack) -> None:
    prompt = "red red red red"
    text = await text_of(stack, "fireworks", prompt=prompt, repetition_penalty=0, max_tokens=8)
    assert text == await text_of(stack, "fireworks", prompt=prompt, repetition_penalty=0.01, max_tokens=8)
    assert "red" in text


async def test_more_tokens_than_any_context_has_are_asked_for_in_vain(stack: Stack) -> None:
    body = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 20_000_000, "stop": "."}
    for dialect, status in (("union", 200), ("fireworks", 200), ("openai", 400), ("sglang", 400)):
        response = await stack.post(body, dialect=dialect)
        assert response.status_code == status, response.text
    assert (await stack.post({**body, "max_tokens": 5.0})).json()["usage"]["completion_tokens"] <= 5


async def test_an_adapter_is_chosen_by_its_listed_path_and_no_other(stack: Stack) -> None:
    listed = (await stack.get("/v1/models/demo:pirate")).json()["root"]
    named = await text_of(stack, lora_path="pirate")
    assert await text_of(stack, lora_path=listed) == named
    assert named != await text_of(stack)
    refused = await stack.post({"model": "demo", "prompt": PROMPT, "lora_path": "/etc/passwd"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")


async def test_the_models_chat_template_is_shown(stack: Stack) -> None:
    assert "<|im_start|>" in (await stack.get("/props")).json()["chat_template"]


async def test_a_client_that_knows_no_tokenizer_learns_all_it_needs(stack: Stack) -> None:
    """What lm-eval's remote tokenizer asks for, in its words."""
    told = (await stack.get("/tokenizer_info")).json()
    assert (told["eos_token"], told["bos_token"]) == ("<|endoftext|>", None)
    text = f"The cat says meow.{told['eos_token']}"
    tokens = (await stack.post({"prompt": text, "add_special_tokens": False}, "/tokenize")).json()["tokens"]
    assert tokens[-1] == 0
    assert (await stack.post({"tokens": tokens}, "/detokenize")).json()["prompt"] == text
