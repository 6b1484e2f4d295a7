"""Bytes to bytes with the real engine: what a client asks of the demo model is what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.engine.harness import core_of
from tests.flow.stack import HandDrivenClient, Stack, running_stack

PROMPTS = [f"Once upon a time there was a {animal}" for animal in
           ("cat", "dog", "fox", "owl", "bear", "hen", "frog", "mouse")]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as made:
        yield made


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def joined(events: list[dict[str, Any]]) -> dict[int, str]:
    pieces: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
    return pieces


async def test_models_lists_the_base_and_its_adapters(stack: Stack) -> None:
    listed = (await stack.get("/v1/models")).json()["data"]
    by_id = {entry["id"]: entry for entry in listed}
    assert set(by_id) == {"demo", "demo:json", "demo:pirate", "demo:shout"}
    assert by_id["demo:pirate"]["parent"] == "demo"
    assert by_id["demo"]["max_model_len"] >= 1024
    assert (await stack.get("/health")).json() == {"status": "ok"}


async def test_a_batch_keeps_its_order_and_counts_each_prompt_once(stack: Stack) -> None:
    alone = [await stack.complete(prompt=prompt, max_tokens=12) for prompt in PROMPTS]
    batch = await stack.complete(prompt=PROMPTS * 2, max_tokens=12, n=2)
    expected = [texts(one)[0] for one in alone * 2 for _ in range(2)]
    assert texts(batch) == expected
    assert [choice["index"] for choice in batch["choices"]] == list(range(32))
    prompt_tokens = sum(one["usage"]["prompt_tokens"] for one in alone) * 2
    completion_tokens = sum(one["usage"]["completion_tokens"] for one in alone) * 4
    assert batch["usage"]["prompt_tokens"] == prompt_tokens
    assert batch["usage"]["completion_tokens"] == completion_tokens
    assert batch["usage"]["total_tokens"] == prompt_tokens + completion_tokens
    assert all(core_of(service).num_steps > 0 for service in stack.services), "both replicas should have worked"


@pytest.mark.law("Stream and whole")
async def test_a_stream_adds_up_to_the_response(stack: Stack) -> None:
    asked = {"prompt": PROMPTS[:4], "max_tokens": 20, "n": 2, "temperature": 0.9, "seed": 11, "echo": True}
    whole = await stack.complete(**asked)
    events = await stack.stream(**asked, stream_options={"include_usage": True})
    assert joined(events) == dict(enumerate(texts(whole)))
    assert events[-1]["choices"] == []
    usage, expected = events[-1]["usage"], whole["usage"]
    assert {k: usage[k] for k in ("prompt_tokens", "completion_tokens")} == {
        k: expected[k] for k in ("prompt_tokens", "completion_tokens")
    }
    order = [choice["index"] for event in events for choice in event["choices"]]
    assert order != sorted(order), "indices should interleave"
    assert len({event["id"] for event in events}) == 1


async def test_lora_path_names_an_adapter_per_prompt(stack: Stack) -> None:
    both = await stack.complete(prompt=[PROMPTS[0]] * 2, lora_path=["pirate", None], max_tokens=16)
    pirate = await stack.complete(model="demo:pirate", prompt=PROMPTS[0], max_tokens=16)
    base = await stack.complete(prompt=PROMPTS[0], max_tokens=16)
    assert texts(both) == texts(pirate) + texts(base)
    assert texts(pirate) != texts(base)


async def test_prompt_forms_agree(stack: Stack) -> None:
    tokenizer = stack.services[0].tokenizer
    from serve_app.core.prompt import Prompt

    text = "The dog likes to"
    ids = tokenizer.encode(Prompt(parts=(text,)))
    expected = texts(await stack.complete(prompt=text, max_tokens=8))
    assert texts(await stack.complete(prompt=ids, max_tokens=8)) == expected
    assert texts(await stack.complete(prompt=[ids, text], max_tokens=8)) == expected * 2
    head = tokenizer.encode(Prompt(parts=("The dog",)))
    assert texts(await stack.complete(prompt=[*head, " likes to"], max_tokens=8)) == expected


async def test_echo_with_logprobs_and_no_tokens_scores_the_prompt(stack: Stack) -> None:
    scored = await stack.complete(prompt=PROMPTS[0], echo=True, logprobs=2, max_tokens=0)
    choice = scored["choices"][0]
    assert choice["text"] == PROMPTS[0]
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == PROMPTS[0]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][0] == 0
    assert scored["usage"]["completion_tokens"] == 0


async def test_logprobs_of_a_generation_equal_those_of_scoring_its_text(stack: Stack) -> None:
    made = await stack.complete(prompt=PROMPTS[1], logprobs=1, max_tokens=24, echo=True)
    choice = made["choices"][0]
    again = await stack.complete(prompt=choice["text"], logprobs=1, max_tokens=0, echo=True)
    first, second = choice["logprobs"], again["choices"][0]["logprobs"]
    assert first["tokens"] == second["tokens"]
    assert first["text_offset"] == second["text_offset"]
    assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=1e-4)


@pytest.mark.law("Stream and whole")
async def test_streamed_logprobs_and_offsets_equal_those_of_the_response(stack: Stack) -> None:
    asked = {"prompt": PROMPTS[2], "max_tokens": 24, "logprobs": 1, "stop": ["e b", "zzz"]}
    whole = (await stack.complete(**asked))["choices"][0]["logprobs"]
    streamed: dict[str, list[Any]] = {key: [] for key in whole}
    for event in await stack.stream(**asked):
        for choice in event["choices"]:
            for key, values in (choice["logprobs"] or {}).items():
                streamed[key] += values
    assert streamed == whole


async def test_a_stop_string_is_cut_and_reported(stack: Stack) -> None:
    free = (await stack.complete(prompt=PROMPTS[3], max_tokens=30))["choices"][0]
    stop = free["text"][4:8]
    cut = (await stack.complete(prompt=PROMPTS[3], max_tokens=30, stop=[stop, "never seen"]))["choices"][0]
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert (cut["finish_reason"], cut["matched_stop"]) == ("stop", stop)
    assert joined(await stack.stream(prompt=PROMPTS[3], max_tokens=30, stop=stop)) == {0: cut["text"]}


@pytest.mark.law("Determinism")
async def test_a_seed_reproduces_whatever_else_runs(stack: Stack) -> None:
    asked = {"prompt": PROMPTS[4], "temperature": 1.2, "seed": 77, "n": 4, "max_tokens": 20}
    first = texts(await stack.complete(**asked))
    crowd = [stack.complete(prompt=prompt, temperature=1.0, max_tokens=30) for prompt in PROMPTS]
    again, *_ = await asyncio.gather(stack.complete(**asked), *crowd)
    assert texts(again) == first
    assert len(set(first)) > 1
    assert texts(await stack.complete(**{**asked, "seed": 78})) != first


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"prompt": [10**7]}, 400, "prompt"),
        ({"prompt": "word " * 5000}, 400, "context"),
        ({"model": "demo:ghost", "prompt": "x"}, 404, "ghost"),
        ({"model": "ghost", "prompt": "x"}, 404, "ghost"),
    ],
)
async def test_what_only_the_model_can_refuse_is_refused_before_anything_starts(
    stack: Stack, body: dict[str, Any], status: int, named: str
) -> None:
    steps = [core_of(service).num_steps for service in stack.services]
    for is_streamed in (False, True):
        response = await stack.post({"model": "demo", "max_tokens": 4, "stream": is_streamed, **body})
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["code"] == status
        assert named in error["message"]
    assert [core_of(service).num_steps for service in stack.services] == steps


async def test_a_client_that_leaves_frees_the_engine(stack: Stack) -> None:
    client = HandDrivenClient(
        stack.app,
        {"model": "demo", "prompt": PROMPTS, "n": 4, "max_tokens": -1, "temperature": 2.0, "stream": True},
    )
    task = asyncio.create_task(client.run())
    for _ in range(5):
        await client.messages.get()
    assert any(core_of(service).load.num_running for service in stack.services)
    client.leaves.set()
    await asyncio.wait_for(task, 60)
    await stack.settled()


async def test_after_everything_nothing_is_held(stack: Stack) -> None:
    await stack.settled()
