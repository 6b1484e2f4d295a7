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

from serve_app.catalog.defaults import read_embedding_form
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
    for wanted, sent in ((2, ids), (1, ids[0]), (1, TEXTS[0]), (2, [TEXTS[0], ids[1]])):
        found = (await embed(stack, input=sent))["data"]
        assert [each["index"] for each in found] == list(range(wanted))
        for one, other in zip(found, by_text, strict=False):  # in other company sums have another order
            torch.testing.assert_close(torch.tensor(one["embedding"]), torch.tensor(other["embedding"]))


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


@pytest.fixture
def sentence_folder(tmp_path: Path) -> Path:
    """The demo as a model of sentence-transformers, whose tokenizer closes each text."""
    for file in DEMO.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    closing = told["added_tokens"][0]
    told["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": closing["content"], "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            closing["content"]: {"id": closing["content"], "ids": [closing["id"]], "tokens": [closing["content"]]}
        },
    }
    written = {
        "tokenizer.json": told,
        "modules.json": [
            {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
        "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": True},
    }
    (tmp_path / "1_Pooling").mkdir()
    for name, content in written.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


async def test_a_text_is_embedded_as_its_folder_says_and_closed_as_its_tokenizer_does(
    sentence_folder: Path, own: Any
) -> None:
    closing = AutoTokenizer.from_pretrained(sentence_folder, local_files_only=True)
    async with running_stack(num_replicas=1, path=str(sentence_folder), adapters=None) as stack:
        for text in TEXTS[0], TEXTS[3]:
            ids = closing(text.lower()).input_ids
            assert ids[-1] in closing.all_special_ids
            answer = await embed(stack, input=text)
            assert answer["usage"]["prompt_tokens"] == len(ids)
            assert_close(answer["data"][0]["embedding"], states(own, ids)[-1])
        whole = await embed(stack, input=[5, 6, 7])
        assert_close(whole["data"][0]["embedding"], states(own, [5, 6, 7])[-1])
        error = await refusal(stack, input=TEXTS[1])
        assert (error["error_code"], error["n_ctx"]) == ("context_length_exceeded", 40)
        cut = await embed(stack, input=TEXTS[1], truncate_sequence=True)
        ids = closing(TEXTS[1].lower()).input_ids[-40:]
        assert_close(cut["data"][0]["embedding"], states(own, ids)[-1])
        text = (await stack.complete(prompt=TEXTS[0], max_tokens=1))["usage"]
        assert text["prompt_tokens"] == len(closing(TEXTS[0]).input_ids) - 1, "a completion goes on from its prompt"


async def test_a_model_whose_modules_are_not_computed_says_which_and_the_way_out(sentence_folder: Path) -> None:
    dense = [{"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (sentence_folder / "modules.json").write_text(json.dumps(dense))
    async with running_stack(num_replicas=1, path=str(sentence_folder), adapters=None) as stack:
        message = (await refusal(stack))["message"]
        assert "module Dense" in message
        assert '"pooling" in its args' in message


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt"),
        ({"pooling_mode_weightedmean_tokens": True}, "weighted_mean"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 8}, "last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "cls_token and max_tokens"),
        ({"pooling_mode": "attention"}, "attention"),
    ],
)
async def test_a_pooling_is_read_in_both_spellings_or_told(
    tmp_path: Path, config: dict[str, object], pooling: str
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    form = read_embedding_form(tmp_path)
    assert pooling in (form.reason or form.pooling)
    assert (form.reason is None) is (pooling == form.pooling)


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
    for one, other in zip(packed.data, plain.data, strict=True):  # in other company sums have another order
        torch.testing.assert_close(torch.tensor(one.embedding), torch.tensor(other.embedding))
    assert packed.usage.total_tokens == plain.usage.prompt_tokens > 0


async def test_a_request_counts_with_its_prompts_tokens(stack: Stack) -> None:
    answer = await embed(stack, input=TEXTS)
    found = (await stack.get("/metrics")).text
    assert 'serve_app_requests_total{model="demo",route="/v1/embeddings",router="router-0",status="200"}' in found
    assert answer["usage"]["prompt_tokens"] > 0
