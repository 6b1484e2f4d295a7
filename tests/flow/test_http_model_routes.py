"""The routes that other servers have beside completions: tokens, properties, adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from serve_app.core.cards import RecordCard, TokenizerCard
from serve_app.core.prompt import ImageCard
from serve_app.http.app import build_app
from serve_app.http.settings import HttpSettings
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card


@pytest.fixture
def backends() -> list[FakeBackend]:
    card = model_card("org/tiny", adapter_card("broken", reason="no weights"), adapter_card("sql"))
    tokenizer = TokenizerCard(kind="TokenizersBackend", special_tokens=(("eos_token", "</s>"), ("im_end", "<e>")))
    card = replace(card, chat_template="{{ messages }}", tokenizer=tokenizer)
    return [FakeBackend(replica_card(f"r{number}", card)) for number in range(2)]


@pytest.fixture
async def fleet(backends: list[FakeBackend]) -> AsyncIterator[Fleet]:
    fleet = Fleet("router-0", aliases={"fast": "org/tiny:sql"})
    for backend in backends:
        fleet.put(backend.card, backend)
    yield fleet
    await fleet.close()


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(Router(fleet), HttpSettings(max_body_bytes=10_000)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"content": "ab"}, [97, 98]),
        ({"content": ""}, []),
        ({"content": "ab", "add_special": True}, [2, 97, 98]),
        ({"content": "ab", "with_pieces": True}, [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]),
        ({"model": "org/tiny", "prompt": "ab"}, [2, 97, 98]),
        ({"model": "fast", "prompt": "ab", "add_special_tokens": False}, [97, 98]),
        ({"model": None, "prompt": "ab", "add_special_tokens": None}, [2, 97, 98]),
        ({"content": "ab", "prompt": None, "truncate": None}, [97, 98]),
    ],
)
async def test_a_text_is_tokenized_in_the_shape_of_either_system(client, body, tokens):
    response = await client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    assert response.json() == {"tokens": tokens, "count": len(tokens), "max_model_len": 512}


async def test_token_strings_come_beside_the_ids(client):
    response = await client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})
    assert response.json()["token_strs"] == ["\x02", "h", "i"]


async def test_tokens_come_back_as_text_under_both_names(client):
    response = await client.post("/detokenize", json={"model": "org/tiny", "tokens": [104, 105]})
    assert (response.status_code, response.json()) == (200, {"content": "hi", "prompt": "hi"})
    assert (await client.post("/detokenize", json={"tokens": []})).json()["content"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param", "complaint"),
    [
        ("/tokenize", {}, "content", "found none of them"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "content", "found content and prompt"),
        ("/tokenize", {"content": ["a"]}, "content", "must be a string"),
        ("/tokenize", {"content": "a", "with_pieces": 1}, "with_pieces", "must be a boolean; found 1"),
        (
            "/tokenize",
            {"content": "", "add_special": True, "add_special_tokens": True},
            "add_special_tokens",
            "names of one parameter",
        ),
        ("/tokenize", {"content": "a", "pieces": True}, "pieces", "one of the parameters of /tokenize"),
        ("/tokenize", {"content": "a", "model": 5}, "model", "must be a string"),
        ("/detokenize", {}, "tokens", "token ids; found nothing"),
        ("/detokenize", {"tokens": "ab"}, "tokens", "a list"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]", "found true"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]", "found -1"),
        ("/detokenize", {"tokens": [1000]}, "tokens[0]", "from 0 to 999"),
    ],
)
async def test_what_is_wrong_is_named_as_it_was_spelled(client, path, body, param, complaint):
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert complaint in error["message"]


async def test_an_unknown_model_a_large_body_and_another_media_type_are_refused(client):
    assert (await client.post("/tokenize", json={"content": "a", "model": "nobody"})).status_code == 404
    assert (await client.post("/tokenize", json={"content": "a" * 20_000})).status_code == 413
    assert (await client.post("/tokenize", content=b"{}", headers={"content-type": "text/plain"})).status_code == 415
    assert (await client.get("/props?model=nobody")).status_code == 404


async def test_the_model_may_be_left_out_only_where_there_is_one(client, fleet):
    other = FakeBackend(replica_card("r9", model_card("other")))
    fleet.put(other.card, other)
    response = await client.post("/tokenize", json={"content": "a"})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert '"model" must be one of org/tiny, other where several models are served; found nothing.' in message
    assert (await client.get("/props")).status_code == 400
    assert (await client.get("/props?model=other")).json()["model_alias"] == "other"


async def test_without_a_ready_model_the_client_is_told_to_come_back():
    fleet = Fleet("router-0")
    transport = httpx.ASGITransport(build_app(Router(fleet)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/tokenize", json={"content": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")


async def test_a_replica_that_is_lost_is_passed_over(client, backends):
    backends[0].die(ConnectionError("gone"))
    assert (await client.post("/tokenize", json={"content": "a"})).json()["tokens"] == [97]
    backends[1].die(ConnectionError("gone"))
    assert (await client.post("/tokenize", json={"content": "a"})).status_code in (500, 503)


async def test_a_client_that_gives_up_leaves_nothing_behind(client, backends):
    for backend in backends:
        backend.submit_gate.clear()
    call = asyncio.ensure_future(client.post("/detokenize", json={"tokens": [97]}))
    await asyncio.sleep(0)
    call.cancel()
    for backend in backends:
        backend.submit_gate.set()
    assert await backends[0].detokenize([97]) == "a"
    assert (await client.post("/detokenize", json={"tokens": [98]})).json()["content"] == "b"


async def test_props_tell_the_models_limits_and_cannot_be_written(client):
    body = (await client.get("/props")).json()
    assert (body["model_alias"], body["n_ctx"], body["n_vocab"]) == ("org/tiny", 512, 1000)
    assert body["default_generation_settings"]["n_ctx"] == 512
    params = body["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_k"], params["repeat_penalty"], params["n_predict"]) == (0.8, 40, 1.1, -1)
    assert (params["seed"], params["samplers"][-1]) == (-1, "temperature")
    assert body["chat_template"] == "{{ messages }}"
    assert (await client.post("/props", json={})).status_code == 405


async def test_the_tokenizer_tells_its_special_tokens_and_the_usual_ones_that_it_lacks(client):
    assert (await client.get("/tokenizer_info?model=fast")).json() == {
        "tokenizer_class": "TokenizersBackend", "model_max_length": 512, "bos_token": None, "eos_token": "</s>",
        "pad_token": None, "unk_token": None, "im_end": "<e>", "chat_template": "{{ messages }}",
    }  # fmt: skip
    assert (await client.get("/tokenizer_info?model=nobody")).status_code == 404


@pytest.mark.parametrize(
    ("change", "capabilities"),
    [
        ({}, ["completion", "chat", "tools"]),
        ({"chat_template": ""}, ["completion"]),
        ({"tool_prompt": "refuse"}, ["completion", "chat"]),
        ({"tool_prompt": "prompt", "images": ImageCard()}, ["completion", "chat", "tools", "vision"]),
        ({"images": ImageCard(reason="it has no encoder")}, ["completion", "chat", "tools"]),
    ],
)
async def test_a_listed_model_tells_what_may_be_sent_to_it(change, capabilities):
    card = replace(model_card("tiny", adapter_card("sql")), chat_template="{{ messages }}")
    backend = FakeBackend(replica_card("r0", replace(card, **change)))
    fleet = Fleet("router-0", aliases={"fast": "tiny:sql"})
    fleet.put(backend.card, backend)
    transport = httpx.ASGITransport(build_app(Router(fleet)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        listed = (await client.get("/v1/models")).json()["data"]
    assert {each["id"]: each["capabilities"] for each in listed} == dict.fromkeys(
        ("tiny", "tiny:sql", "fast"), capabilities
    )
    await fleet.close()


@pytest.mark.parametrize("allowed", [(), ("return_hidden_states",), ("return_hidden_states", "return_routed_experts")])
async def test_a_listed_model_refuses_the_parameters_that_it_says_and_no_others(allowed):
    records = RecordCard(**{name.replace("return_", "returns_"): True for name in allowed})
    backend = FakeBackend(replica_card("r0", replace(model_card("tiny"), records=records)))
    fleet = Fleet("router-0")
    fleet.put(backend.card, backend)
    transport = httpx.ASGITransport(build_app(Router(fleet)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        [listed] = (await client.get("/v1/models")).json()["data"]
        for name in ("return_hidden_states", "return_routed_experts"):
            answer = await client.post("/v1/explain", json={"model": "tiny", "prompt": "a", name: True})
            assert (answer.status_code == 400) == (name in listed["refuses"]) == (name not in allowed), answer.text
    await fleet.close()


async def test_usable_adapters_are_listed_by_the_number_that_requests_use(client):
    body = (await client.get("/lora-adapters")).json()
    assert body == [{"id": 0, "path": "adapters/sql", "scale": 0.0, "name": "org/tiny:sql"}]
    assert (await client.post("/lora-adapters", json=[])).status_code == 405
