"""POST /v1/embeddings from bytes to bytes: vectors of a direct forward, in every form of input and of answer."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from serve_app.catalog.models import BUILTIN_MODELS
from tests.families.making import save_model
from tests.flow.stack import Stack, running_stack

DEMO = BUILTIN_MODELS["builtin:demo"]
TEXTS = ["Once upon a time", "The cat says meow. " * 40, "A", "The dog says woof."]
PATH = "/v1/embeddings"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(max_batch_tokens=64, pooling="mean") as running:
        yield running


@pytest.fixture(scope="module")
def own() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32").eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@torch.inference_mode()
def states(model: Any, token_ids: list[int]) -> Tensor:
    """[tokens, hidden]"""
    found: Tensor = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0]
    return found


def mean(model: Any, token_ids: list[int]) -> Tensor:
    pooled = states(model, token_ids).mean(dim=0)
    return pooled / pooled.norm()


def assert_close(found: object, vector: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), vector, rtol=1e-4, atol=1e-5)


async def embed(stack: Stack, **body: Any) -> dict[str, Any]:
    response = await stack.post({"model": "demo", **body}, PATH)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refusal(stack: Stack, **body: Any) -> dict[str, Any]:
    response = await stack.post({"model": "demo", "input": "a", **body}, PATH)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_each_input_has_the_mean_of_its_states_whatever_is_cached(stack: Stack, own: Any, tokenizer: Any) -> None:
    for _ in range(2):
        answer = await embed(stack, input=TEXTS)
        assert [each["index"] for each in answer["data"]] == [0, 1, 2, 3]
        assert {each["object"] for each in answer["data"]} == {"embedding"}
        for text, each in zip(TEXTS, answer["data"], strict=True):
            assert_close(each["embedding"], mean(own, tokenizer(text).input_ids))
        num_tokens = sum(len(tokenizer(text).input_ids) for text in TEXTS)
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert (answer["object"], answer["model"]) == ("list", "demo")


async def test_texts_and_token_ids_mean_the_same(stack: Stack, tokenizer: Any) -> None:
    ids = [tokenizer(text).input_ids for text in TEXTS[:2]]
    by_text = (await embed(stack, input=TEXTS[:2]))["data"]
    assert (await embed(stack, input=ids))["data"] == by_text
    assert (await embed(stack, input=ids[0]))["data"] == by_text[:1]
    assert (await embed(stack, input=TEXTS[0]))["data"] == by_text[:1]
    assert (await embed(stack, input=[TEXTS[0], ids[1]]))["data"] == by_text


async def test_base64_holds_the_same_float32(stack: Stack) -> None:
    numbers = (await embed(stack, input=TEXTS[0]))["data"][0]["embedding"]
    packed = (await embed(stack, input=TEXTS[0], encoding_format="base64"))["data"][0]["embedding"]
    found = torch.frombuffer(bytearray(base64.b64decode(packed)), dtype=torch.float32)
    assert torch.equal(found, torch.tensor(numbers, dtype=torch.float32))


async def test_an_adapter_has_embeddings_of_its_own(stack: Stack, own: Any, tokenizer: Any) -> None:
    from peft import PeftModel

    answer = await embed(stack, model="demo:pirate", input=TEXTS[0])
    assert answer["model"] == "demo:pirate"
    base = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32")
    adapted = PeftModel.from_pretrained(base, str(Path("adapters/demo/pirate"))).eval()
    ids = tokenizer(TEXTS[0]).input_ids
    assert_close(answer["data"][0]["embedding"], mean(adapted, ids))
    assert not torch.allclose(mean(adapted, ids), mean(own, ids), atol=1e-3)


async def test_company_changes_nothing(stack: Stack) -> None:
    alone = (await embed(stack, input=TEXTS))["data"]
    text = (await stack.complete(prompt=TEXTS[0], max_tokens=24))["choices"]
    work = [embed(stack, input=TEXTS) for _ in range(4)]
    beside = [stack.complete(prompt=TEXTS[0], max_tokens=24) for _ in range(4)]
    embedded, completed = await asyncio.gather(asyncio.gather(*work), asyncio.gather(*beside))
    for answer in embedded:
        for each, before in zip(answer["data"], alone, strict=True):
            assert_close(each["embedding"], torch.tensor(before["embedding"]))
    assert all(answer["choices"] == text for answer in completed)
    await stack.settled()


async def test_the_last_state_is_the_embedding_where_that_is_configured(own: Any, tokenizer: Any) -> None:
    async with running_stack(num_replicas=1, pooling="last") as stack:
        for _ in range(2):
            answer = await embed(stack, input=TEXTS[1])
            last = states(own, tokenizer(TEXTS[1]).input_ids)[-1]
            assert_close(answer["data"][0]["embedding"], last / last.norm())


async def test_a_model_without_pooling_says_which_key_gives_it_one() -> None:
    async with running_stack(num_replicas=1, pooling=None) as stack:
        error = await refusal(stack)
        assert (error["param"], error["error_code"]) == ("model", "unsupported_parameter")
        assert '"pooling" in its args' in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "must not be empty"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input[1]", "must not be empty"),
        ({"input": None}, "input", "a list of at most 1024 strings"),
        ({"input": {"prompt_string": "a"}}, "input", "a list of at most 1024 strings"),
        ({"input": [{"prompt_string": "a"}]}, "input[0]", "a non-empty string or a list of token ids"),
        ({"input": [1, "a"]}, "input", "a string, a list of token ids"),
        ({"input": ["a", [1, "a"]]}, "input[1]", "a non-empty string or a list of token ids"),
        ({"input": ["a"] * 1025}, "input", "at most 1024 inputs"),
        ({"input": [10**6]}, "input", "token ids from 0 to"),
        ({"encoding_format": "int8"}, "encoding_format", '"float" or "base64"'),
        ({"dimensions": 0}, "dimensions", "an integer from 1"),
        ({"dimensions": 8}, "dimensions", "was trained for no others"),
        ({"n": 2}, "n", "as it is not carried out here"),
    ],
)
async def test_what_is_wrong_is_named(stack: Stack, body: dict[str, Any], param: str, words: str) -> None:
    error = await refusal(stack, **body)
    assert error["param"] == param
    assert words in error["message"]


async def test_an_input_beyond_the_context_is_refused_or_cut_where_that_is_asked_for(
    stack: Stack, own: Any, tokenizer: Any
) -> None:
    ids = (tokenizer("The cat says meow. ").input_ids * 600)[:2050]
    error = await refusal(stack, input=["A", ids])
    assert (error["error_code"], error["param"]) == ("context_length_exceeded", "input")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (2050, 2048)
    answer = await embed(stack, input=["A", ids], truncate_sequence=True)
    assert_close(answer["data"][1]["embedding"], mean(own, ids[-2048:]))
    assert answer["usage"]["prompt_tokens_details"] == {"truncated_tokens": 2}
    whole = await embed(stack, input=ids[:2048])
    assert_close(whole["data"][0]["embedding"], mean(own, ids[:2048]))


async def test_an_input_is_kept_to_so_many_tokens_and_hints_are_told(stack: Stack) -> None:
    hints = {"input_type": "query", "priority": 3, "metadata": {"a": "b"}}
    body = {"model": "demo", "input": [5, 6, 7, 8, 9], "truncate_prompt_tokens": 3, "encoding_format": "base64"}
    response = await stack.post({**body, **hints}, PATH)
    kept = await embed(stack, input=[7, 8, 9], encoding_format="base64")
    assert (response.status_code, response.json()["data"]) == (200, kept["data"])
    assert response.headers["x-ignored-parameters"] == "input_type, priority, metadata"
    first = await embed(stack, **body | {"truncation_side": "right"})
    assert first["data"] == (await embed(stack, input=[5, 6, 7], encoding_format="base64"))["data"]


async def test_dimensions_are_cut_where_the_model_was_trained_for_them(tmp_path: Path) -> None:
    save_model("llama", {}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    own = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True, dtype="float32").eval()
    async with running_stack(num_replicas=1, path=str(tmp_path), adapters=None) as stack:
        for size in (8, 16, 32):
            vector = (await embed(stack, input=[5, 6, 7], dimensions=size))["data"][0]["embedding"]
            pooled = states(own, [5, 6, 7]).mean(dim=0)[:size]
            assert_close(vector, pooled / pooled.norm())
        assert "must be 8 or 16 or 32" in (await refusal(stack, dimensions=12))["message"]


async def test_the_openai_client_reads_both_formats(stack: Stack) -> None:
    transport = httpx.ASGITransport(app=stack.app)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        AsyncOpenAI(base_url="http://flow/v1", api_key="none", http_client=http) as client,
    ):
        packed = await client.embeddings.create(model="demo", input=TEXTS, user="somebody")  # asks for base64
        plain = await client.embeddings.create(model="demo", input=TEXTS, encoding_format="float")
    assert [each.embedding for each in packed.data] == [
        torch.tensor(each.embedding, dtype=torch.float32).tolist() for each in plain.data
    ]
    assert packed.usage.total_tokens == plain.usage.prompt_tokens > 0


async def test_a_request_counts_with_its_prompts_tokens(stack: Stack) -> None:
    answer = await embed(stack, input=TEXTS)
    found = (await stack.get("/metrics")).text
    assert 'serve_app_requests_total{model="demo",route="/v1/embeddings",router="router-0",status="200"}' in found
    assert answer["usage"]["prompt_tokens"] > 0
