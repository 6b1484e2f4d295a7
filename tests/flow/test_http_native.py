"""llama.cpp's own completion routes."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from tests.fakes import EOS, FakeBackend, model_card, replica_card


@pytest.fixture
async def client():
    fleet = Fleet("router-0")
    backend = FakeBackend()
    fleet.put(backend.card, backend)
    transport = httpx.ASGITransport(build_app(Router(fleet)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    await fleet.close()


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_one_choice_is_one_result_in_llama_cpps_words(client, path):
    response = await client.post(path, json={"prompt": "one two", "n_predict": 3})
    assert response.status_code == 200, response.text
    assert response.headers["x-completions-dialect"] == "llama.cpp"
    body = response.json()
    assert body["content"] == " p0s0w0 p0s0w1 p0s0w2"
    assert (body["stop"], body["stop_type"], body["stopping_word"]) == (True, "limit", "")
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["model"]) == (3, 2, "tiny")
    assert (len(body["tokens"]), body["prompt"], body["truncated"]) == (3, "one two", False)
    settings = body["generation_settings"]
    assert (settings["temperature"], settings["repeat_penalty"], settings["repeat_last_n"]) == (0.8, 1.1, 64)
    assert (settings["n_predict"], settings["max_tokens"], settings["n_probs"]) == (3, 3, 0)
    assert settings["samplers"][-1] == "temperature"
    assert not {"repetition_penalty", "logprobs", "model"} & set(settings)
    assert "completion_probabilities" not in body


async def test_what_ended_it_is_told(client):
    word = (await client.post("/completion", json={"prompt": "a", "stop": ["w1"]})).json()
    assert (word["content"], word["stop_type"], word["stopping_word"]) == (" p0s0w0 p0s0", "word", "w1")
    end = (await client.post("/completion", json={"prompt": "a"})).json()
    assert (end["stop_type"], end["tokens"][-1], end["tokens_predicted"]) == ("eos", EOS, 41)


async def test_the_settings_are_those_that_were_sent_in_llama_cpps_words(client):
    body = {"prompt": "a", "n_predict": 2, "max_tokens": 9, "repeat_penalty": 1.3, "n_probs": 2, "mirostat": 2}
    body |= {"logit_bias": [[5, False], ["x", 2]], "stop": ["END"], "samplers": ["top_k"], "seed": 7}
    response = await client.post("/completion", json=body)
    settings = response.json()["generation_settings"]
    assert response.headers["x-ignored-parameters"] == "max_tokens"
    expected = {"n_predict": 2, "max_tokens": 2, "repeat_penalty": 1.3, "n_probs": 2, "mirostat": 2, "seed": 7}
    expected |= {"logit_bias": [{"token": 5, "bias": False}, {"token": "x", "bias": 2.0}]}
    expected |= {"stop": ["END"], "samplers": ["top_k"]}
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize("accepts", [False, True])
async def test_the_only_model_answers_to_any_name_unless_that_is_switched_off(accepts):
    fleet = Fleet("router-0")
    backend = FakeBackend()
    fleet.put(backend.card, backend)
    config = None if accepts else RouterConfig(accepts_any_model=False)
    transport = httpx.ASGITransport(build_app(Router(fleet, config)))
    body = {"model": "gpt-3.5-turbo", "prompt": "a", "max_tokens": 1}
    llama_cpp = {"X-Completions-Dialect": "llama.cpp"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path, headers in (("/v1/completions", llama_cpp), ("/completion", {})):
            response = await client.post(path, json=body, headers=headers)
            assert response.status_code == (200 if accepts else 404)
            assert not accepts or response.json()["model"] == "gpt-3.5-turbo"
        assert (await client.post("/v1/completions", json=body)).status_code == 404
        nobody = await client.post("/completion", json=body | {"model": "tiny:nobody"})
        assert nobody.status_code == 400
        other = FakeBackend(replica_card("r1", model_card("other")))
        fleet.put(other.card, other)
        assert (await client.post("/completion", json=body)).status_code == 404
    await fleet.close()


async def test_a_chat_without_a_model_is_the_only_ones_and_names_those_to_choose_from(client):
    fleet = Fleet("router-0")
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for name in ("tiny", "other"):
        backend = FakeBackend(replica_card(name, replace(model_card(name), chat_template="{{ messages[0].content }}")))
        fleet.put(backend.card, backend)
        transport = httpx.ASGITransport(build_app(Router(fleet)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post("/v1/chat/completions", json=chat)
        if name == "tiny":
            assert response.status_code == 200, response.text
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (404, "model")
    assert "one of other, tiny" in error["message"]
    await fleet.close()


async def test_what_a_chat_template_does_not_read_is_told(client):
    fleet = Fleet("router-0")
    for name, reads in (("plain", "{{ messages }}"), ("thinks", "{{ messages }}{{ enable_thinking }}{{ shape }}")):
        backend = FakeBackend(replica_card(name, replace(model_card(name), chat_template=reads)))
        fleet.put(backend.card, backend)
    sent = {"reasoning_effort": "low", "chat_template_kwargs": {"shape": 1, "odd": 2}, "documents": [{"text": "a"}]}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **sent}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(Router(fleet))), base_url="http://t") as http:
        for model, told in (
            ("plain", "chat_template_kwargs.odd, chat_template_kwargs.shape, documents, reasoning_effort"),
            ("thinks", "chat_template_kwargs.odd, documents"),
            (["plain", "thinks"], "chat_template_kwargs.odd, documents"),
        ):
            response = await http.post("/v1/chat/completions", json=chat | {"model": model})
            assert (response.status_code, response.headers["x-ignored-parameters"]) == (200, told)
        response = await http.post(
            "/v1/responses", json={"model": "plain", "input": "a", "reasoning": {"effort": "low"}}
        )
        assert response.headers["x-ignored-parameters"] == "reasoning.effort"
    await fleet.close()


async def test_the_fields_that_are_asked_for_are_alone_in_a_result_and_in_the_last_of_a_stream(client):
    fields = ["content", "timings/predicted_n", "generation_settings/top_k", "nothing", "content/x", ""]
    body = {"prompt": "a", "n_predict": 2, "response_fields": fields}
    expected = {"timings/predicted_n": 2, "generation_settings/top_k": 40}
    assert (await client.post("/completion", json=body)).json() == {"content": " p0s0w0 p0s0w1", **expected}
    several = (await client.post("/completion", json=body | {"n": 2})).json()
    assert [set(each) for each in several] == [{"content", *expected}] * 2
    assert (await client.post("/completion", json=body | {"response_fields": [""]})).json() == {}
    *_, last = streamed(await client.post("/completion", json=body | {"stream": True}))
    assert last == {"content": last["content"], **expected}
    elsewhere = await client.post("/v1/completions", json=body | {"model": "tiny"})
    assert elsewhere.headers["x-ignored-parameters"] == "response_fields"


async def test_several_choices_are_a_list_in_order(client):
    body = (await client.post("/completion", json={"prompt": ["a", "b"], "n": 2, "n_predict": 1})).json()
    assert [(result["index"], result["content"]) for result in body] == [
        (0, " p0s0w0"), (1, " p0s1w0"), (2, " p1s0w0"), (3, " p1s1w0"),
    ]  # fmt: skip


async def test_probabilities_come_where_they_are_asked_for(client):
    body = (await client.post("/completion", json={"prompt": "a", "n_predict": 2, "n_probs": 2})).json()
    first, second = body["completion_probabilities"]
    assert (first["token"], second["token"]) == (" p0s0w0", " p0s0w1")
    assert len(first["top_logprobs"]) >= 2
    assert {"token", "logprob"} == set(first["top_logprobs"][0])


async def test_a_stream_is_of_results_and_ends_with_the_one_that_stops(client):
    body = {"prompt": "a", "n_predict": 3, "stream": True}
    lines = (await client.post("/completion", json=body)).text.split("\n\n")
    results = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(result["content"] for result in results) == " p0s0w0 p0s0w1 p0s0w2"
    assert [result["stop"] for result in results] == [False] * (len(results) - 1) + [True]
    assert results[-1]["stop_type"] == "limit"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_each_result_has_the_timings_of_its_own_choice(client, is_stream):
    body = {"prompt": ["a", "b c d"], "n": 2, "n_predict": 3, "stream": is_stream}
    response = await client.post("/completion", json=body)
    results = response.json() if not is_stream else streamed(response)
    last = {result["index"]: result for result in results if result["stop"]}
    assert [last[index]["timings"]["predicted_n"] for index in range(4)] == [3, 3, 3, 3]
    prompts = [last[index]["timings"]["cache_n"] + last[index]["timings"]["prompt_n"] for index in range(4)]
    assert prompts == [1, 1, 3, 3]
    assert not any("timings" in result for result in results if not result["stop"])


async def test_timings_come_with_each_token_where_they_are_asked_for(client):
    body = {"prompt": "a", "n_predict": 3, "stream": True, "timings_per_token": True}
    results = streamed(await client.post("/completion", json=body))
    assert len(results) > 1
    assert all(result["timings"]["predicted_n"] == result["tokens_predicted"] for result in results)


def streamed(response):
    lines = response.text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("prompt_logprobs", 0),
        ("request_id", "abc"),
        ("return_cached_tokens_details", True),
        ("return_hidden_states", True),
        ("return_routed_experts", True),
    ],
)
@pytest.mark.parametrize("path", ["/completion", "/completions", "/infill"])
async def test_what_has_no_place_there_is_refused_by_name(client, path, name, value):
    text = {"input_prefix": "a", "input_suffix": "b"} if path == "/infill" else {"prompt": "a"}
    response = await client.post(path, json={**text, name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text


async def test_what_nobody_wants_of_it_is_taken(client):
    nothing = {"best_of": None, "prompt_logprobs": None, "return_cached_tokens_details": False}
    assert (await client.post("/completion", json={"prompt": "a", "n_predict": 1, **nothing})).status_code == 200
