"""Clients of the field, by the very bytes that they send: each gets what it got when they were recorded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
import torch
import uvicorn
from transformers import AutoModelForCausalLM

from serve_app.catalog.models import BUILTIN_MODELS
from serve_app.http.settings import HttpSettings
from tests.flow.recordings import Answer, names, replay
from tests.flow.stack import running_stack

LISTED = "http://127.0.0.1:18300"
DOG = [", a strong dog named Fern lived near"]
KEYS = ["- a key\n- a key\n"]
MODELS = ["demo", "demo:json", "demo:pirate", "demo:shout"]


@dataclass(frozen=True, slots=True)
class Refused:
    """By which status, for which parameter."""

    status: int
    param: str | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """So many choices, drawn with no seed."""

    num_choices: int


ANSWERS: dict[str, list[object]] = {
    "ai-sdk": [KEYS, Refused(404, "model")],
    "ai-sdk-stream": [KEYS],
    "browser": [DOG, MODELS, Refused(400, None)],
    "browser-preflight": [b"OK"],
    "curl-http2": [DOG],
    "java": [DOG, DOG, DOG, DOG, MODELS],
    "java-chunked": [DOG],
    "langchain": [DOG, DOG],
    "langchain-async": [[" is meow."]],
    "litellm": [DOG],
    "litellm-error": [Refused(400, "temperature")],
    "litellm-stream": [DOG],
    "llama-index": [DOG, DOG],
    "llama-index-async": [[" is meow."], [" likes to eat bones."]],
    "llama.cpp-completion": [[", there was a shy dog named Felix"]],
    "llama.cpp-detokenize": [{"content": "Once upon a time", "prompt": "Once upon a time"}],
    "llama.cpp-stream": [Drawn(1)],
    "llama.cpp-tokenize": [{"tokens": [700, 702, 264, 701], "count": 4, "max_model_len": 2048}],
    "lm-eval-echo": [Drawn(1)],
    "lm-eval-until": [[" likes to eat bones."]],
    "openai-node": [DOG, Drawn(4), Refused(404, "model")],
    "openai-node-stream": [DOG, MODELS],
    "openai-python": [MODELS, DOG, [", a strong pig named Ruby lived near"]],
    "openai-python-async": [Drawn(1)],
    "openai-python-more": [Drawn(4), Drawn(2), Refused(404, "model"), Refused(400, "temperature"), Drawn(1)],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address() -> AsyncIterator[tuple[str, int]]:
    """Where the service listens, behind a server that reads the body behind an offer of HTTP/2, as HAProxy does."""
    listener = socket.create_server(("127.0.0.1", 0))
    async with running_stack(num_replicas=1, settings=HttpSettings(cors_origins=(LISTED,))) as stack:
        server = uvicorn.Server(uvicorn.Config(stack.app, http="h11", lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield listener.getsockname()
        server.should_exit = True
        await serving


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def told(answer: Answer, expected: object) -> object:
    """What came back, as `expected` tells it."""
    if isinstance(expected, bytes):
        return answer.body
    (first, *_) = answer.parts
    if isinstance(expected, Refused):
        return Refused(answer.status, first["error"]["param"])
    if isinstance(expected, dict):
        return first
    if isinstance(expected, Drawn):
        return Drawn(len(answer.texts))
    return [model["id"] for model in first["data"]] if expected is MODELS else answer.texts


async def test_every_recording_has_its_answers() -> None:
    assert names() == set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_client_gets_what_it_came_for(address: tuple[str, int], name: str) -> None:
    answers = await asyncio.to_thread(replay, name, address)
    assert [told(*pair) for pair in zip(answers, ANSWERS[name], strict=True)] == ANSWERS[name]
    for answer, expected in zip(answers, ANSWERS[name], strict=True):
        assert answer.status == (expected.status if isinstance(expected, Refused) else 200)


@pytest.mark.parametrize(
    ("name", "last_event"),
    [
        ("openai-node-stream", "[DONE]"),
        ("ai-sdk-stream", "[DONE]"),
        ("openai-python-async", "[DONE]"),
        ("llama.cpp-stream", None),
    ],
)
async def test_a_stream_ends_as_its_client_expects(address: tuple[str, int], name: str, last_event: str | None) -> None:
    answer, *_ = await asyncio.to_thread(replay, name, address)
    assert answer.headers["transfer-encoding"] == "chunked"
    if last_event is not None:
        assert answer.events[-1] == last_event
    else:
        assert json.loads(answer.events[-1])["stop"] is True


@pytest.mark.parametrize("name", ["openai-node-stream", "ai-sdk-stream"])
async def test_usage_that_was_asked_for_is_in_the_last_chunk(address: tuple[str, int], name: str) -> None:
    answer, *_ = await asyncio.to_thread(replay, name, address)
    assert answer.parts[-1]["usage"]["completion_tokens"] == 8


async def test_a_page_may_read_what_its_script_asks_for(address: tuple[str, int]) -> None:
    (preflight,) = await asyncio.to_thread(replay, "browser-preflight", address)
    allowed = {name.strip() for name in preflight.headers["access-control-allow-headers"].lower().split(",")}
    assert {"authorization", "content-type", "x-completions-dialect"} <= allowed
    for answer in (preflight, *await asyncio.to_thread(replay, "browser", address)):
        assert answer.headers["access-control-allow-origin"] == LISTED


async def test_lm_eval_reads_the_log_likelihood_that_a_forward_pass_gives(address: tuple[str, int]) -> None:
    """The prompt ends with the token that ends texts; lm-eval leaves out the one token that it has to ask for."""
    (answer,) = await asyncio.to_thread(replay, "lm-eval-echo", address)
    logprobs = answer.parts[0]["choices"][0]["logprobs"]["token_logprobs"]
    prompt = [629, 927, 1639, 344, 316, 19, 0]
    model = AutoModelForCausalLM.from_pretrained(
        BUILTIN_MODELS["builtin:demo"], local_files_only=True, dtype=torch.float32
    )
    with torch.no_grad():
        rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert logprobs[0] is None
    assert logprobs[1:-1] == pytest.approx([rows[at, token].item() for at, token in enumerate(prompt[1:])], abs=1e-4)
