"""Hidden states and chosen experts from bytes to bytes: of which tokens, how written, where refused."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.families.making import save_model
from tests.flow.stack import Stack, running_stack

PROMPT = [72, 105, 32, 116, 104, 101, 114, 101]
ALLOWED = {"return_hidden_states": True, "return_routed_experts": True, "max_recorded_bytes": 4096}
PLAIN = {"adapters": None, "threads": 1, "num_replicas": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    save_model("qwen3_moe", {}, path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(folder: Path) -> AsyncIterator[Stack]:
    async with running_stack(path=str(folder), **PLAIN, **ALLOWED) as running:
        yield running


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="float32").eval()


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@torch.inference_mode()
def expected(own: Any, token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden states [tokens, hidden], experts [tokens, layers, 2] of one direct forward."""
    output = own(input_ids=torch.tensor([token_ids]), output_hidden_states=True, output_router_logits=True)
    experts = torch.stack([torch.topk(logits, 2).indices for logits in output.router_logits], dim=1)
    return output.hidden_states[-1][0], experts


def experts_in(sglext: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(sglext["routed_experts"])), dtype=torch.int32).view(shape)


def assert_close(found: object, states: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), states, rtol=1e-4, atol=1e-4)


def body(**changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True, **changes}


async def test_states_are_of_each_drawn_token_and_with_echo_of_the_prompt_too(stack: Stack, own: Any) -> None:
    for echo in ({}, {"echo": True}, {"echo_last": 3}):
        (choice,) = (await stack.complete(**body(return_hidden_states=True, **echo)))["choices"]
        states, _ = expected(own, PROMPT + choice["token_ids"][:-1])
        num_wanted = {"{}": 4, '{"echo": true}': 11, '{"echo_last": 3}': 6}[json.dumps(echo)]
        assert_close(choice["hidden_states"], states[-num_wanted:])


async def test_the_last_state_stands_alone_and_is_all_that_sglang_returns(stack: Stack, own: Any) -> None:
    (choice,) = (await stack.complete(**body(return_hidden_states="last")))["choices"]
    states, _ = expected(own, PROMPT + choice["token_ids"][:-1])
    assert_close(choice["hidden_states"], states[-1])
    asked = {"model": "demo", "temperature": 0, **body(return_hidden_states=True)}
    (spoken,) = (await stack.post(asked, dialect="sglang")).json()["choices"]
    assert spoken["hidden_states"] == choice["hidden_states"]


async def test_experts_are_of_every_computed_token_of_each_choice(stack: Stack, own: Any) -> None:
    prompts = [PROMPT, PROMPT[:3]]
    answer = await stack.complete(**body(prompt=prompts, n=2, return_routed_experts=True))
    for choice in answer["choices"]:
        computed = prompts[choice["index"] // 2] + choice["token_ids"][:-1]
        _, experts = expected(own, computed)
        assert choice["sglext"]["routed_experts_shape"] == list(experts.shape) == [len(computed), 2, 2]
        assert torch.equal(experts_in(choice["sglext"], experts.shape), experts)
    assert answer["sglext"]["routed_experts"] == answer["choices"][0]["sglext"]["routed_experts"]


async def test_a_stream_has_them_in_a_chunk_of_their_own_per_choice(stack: Stack) -> None:
    asked = body(n=2, return_hidden_states=True, return_routed_experts=True, stream_options={"include_usage": True})
    whole = await stack.complete(**asked)
    chunks = await stack.stream(**asked)
    found = [(chunk["choices"][0], at) for at, chunk in enumerate(chunks) if "hidden_states" in str(chunk)]
    assert [choice["text"] for choice, _ in found] == ["", ""]
    for choice, at in found:
        expected_choice = whole["choices"][choice["index"]]
        assert choice["hidden_states"] == expected_choice["hidden_states"]
        assert choice["sglext"] == expected_choice["sglext"]
        finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:at] if chunk["choices"]]
        assert "length" in finishes, "recorded before the choice had ended"
    assert chunks[-2] == {**chunks[-2], "choices": [], "sglext": whole["sglext"]}
    assert chunks[-1]["usage"] == whole["usage"]


async def test_who_does_not_ask_gets_nothing_of_it(stack: Stack) -> None:
    answer = await stack.complete(**body())
    assert "sglext" not in answer
    assert not {"hidden_states", "sglext"} & set(answer["choices"][0])


async def test_details_of_the_cache_stand_beside_experts(stack: Stack) -> None:
    answer = await stack.complete(**body(return_routed_experts=True, return_cached_tokens_details=True))
    assert set(answer["sglext"]) == {"routed_experts", "cached_tokens_details"}
    assert answer["sglext"]["cached_tokens_details"]["device"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_may_be_kept_is_refused_before_the_status_line(stack: Stack, stream: bool) -> None:
    # a state has 32 numbers: 4096 bytes hold 32 of them
    fits = {"model": "demo", "prompt": PROMPT, "max_tokens": 32, "return_hidden_states": True, "stream": stream}
    assert (await stack.post(fits)).status_code == 200
    for more in ({"max_tokens": 33}, {"n": 2}, {"echo": True}):
        response = await stack.post({**fits, **more})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["max_recorded_bytes"]) == ("return_hidden_states", 4096)
        assert "at most 4096 bytes" in error["message"]


async def test_llama_cpps_own_shape_has_no_place_for_them(stack: Stack) -> None:
    for name in ("return_hidden_states", "return_routed_experts"):
        response = await stack.post({"prompt": PROMPT, name: True}, "/completion")
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_a_model_that_is_not_configured_for_them_refuses_and_names_the_key(folder: Path) -> None:
    async with running_stack(path=str(folder), **PLAIN) as stack:
        for name in ("return_hidden_states", "return_routed_experts"):
            response = await stack.post({"model": "demo", "prompt": PROMPT, name: True})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            assert f'"{name}: true" in its args' in error["message"]
            assert (await stack.post({"model": "demo", "prompt": PROMPT, name: False})).status_code == 200


async def test_chats_have_them_like_completions() -> None:
    asked = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    async with running_stack(num_replicas=1, return_hidden_states=True) as stack:
        path = "/v1/chat/completions"
        whole = (await stack.post({**asked, "return_hidden_states": True, "return_token_ids": True}, path)).json()
        (choice,) = whole["choices"]
        assert len(choice["hidden_states"]) == len(choice["token_ids"])
        last = (await stack.post({**asked, "return_hidden_states": "last", "stream": True}, path)).text
        chunks = [json.loads(line[6:]) for line in last.split("\n\n")[:-2]]
        (alone,) = [c for chunk in chunks for c in chunk["choices"] if "hidden_states" in c]
        assert (alone["delta"], alone["hidden_states"]) == ({}, choice["hidden_states"][-1])


async def test_a_dense_model_has_no_experts_to_tell_of() -> None:
    async with running_stack(num_replicas=1, return_routed_experts=True) as stack:
        answer = await stack.complete(prompt="Once", max_tokens=2, return_routed_experts=True)
        assert "sglext" not in answer
        assert "sglext" not in answer["choices"][0]
        again = await stack.complete(prompt="Once upon a time, " * 8, max_tokens=2, return_routed_experts=True)
        cached = await stack.complete(prompt="Once upon a time, " * 8, max_tokens=2, return_routed_experts=True)
        assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert cached["choices"] == again["choices"]
