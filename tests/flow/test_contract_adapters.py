"""Adapters in a request: with scales, mixed, by name, number and path, and several models at once; the real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from serve_app.deployments.arguments import ModelArgs
from serve_app.deployments.loading import load_service
from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.engine.harness import core_of
from tests.flow.stack import ROUTER_ID, Stack, running_stack

PROMPT = "Once upon a time there was a cat"
MIX = {"pirate": 0.6, "shout": 0.4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=2) as running:
        yield running


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@asynccontextmanager
async def running_bases(*names: str) -> AsyncIterator[Stack]:
    """One replica for each of these bases, all but the first with a context of 64 tokens."""
    fleet, services = Fleet(ROUTER_ID), []
    for at, name in enumerate(names):
        arguments = ModelArgs(
            name=name,
            path="builtin:demo",
            adapters="adapters/demo",
            dtype="float32",
            kv_cache_bytes=32 << 20,
            lease_s=600,
            max_model_len=64 if at else None,
        )
        service = await asyncio.to_thread(load_service, arguments, f"{name}-0")
        service.start()
        services.append(service)
        fleet.put(await service.hello(ROUTER_ID), service)
    try:
        yield Stack(app=build_app(Router(fleet)), services=services, fleet=fleet)
    finally:
        await fleet.close()
        for service in services:
            await service.close()


async def text_of(stack: Stack, **body: Any) -> str:
    text: str = (await stack.complete(**{"prompt": PROMPT, "max_tokens": 24, **body}))["choices"][0]["text"]
    return text


async def refusal(stack: Stack, dialect: str = "union", **body: Any) -> tuple[int, Any, str]:
    response = await stack.post({"model": "demo", "prompt": PROMPT, **body}, dialect=dialect)
    error = response.json().get("error") or response.json()
    return response.status_code, error.get("param"), error["message"]


async def numbers(stack: Stack) -> dict[str, int]:
    listed = (await stack.get("/lora-adapters")).json()
    return {each["name"].removeprefix("demo:"): each["id"] for each in listed}


async def test_every_way_to_write_a_mix_means_the_same(stack: Stack) -> None:
    text = await text_of(stack, model="demo:pirate*0.6+shout*0.4")
    ids = await numbers(stack)
    lora = [{"id": ids[name], "scale": scale} for name, scale in MIX.items()]
    assert await text_of(stack, lora=lora) == text
    assert await text_of(stack, lora=[*lora, {"id": ids["json"], "scale": 0}]) == text
    for mix in ("shout*0.4+pirate*0.6", "pirate*0.3+shout*.4+pirate*0.3"):
        assert await text_of(stack, adapter=mix) == text
        assert await text_of(stack, lora_path=mix) == text
        assert await text_of(stack, model=f"demo::{mix}") == text
        assert await text_of(stack, model=mix) == text, "only one base has these adapters"
    others = [{}, {"adapter": "pirate"}, {"adapter": "shout"}, {"adapter": "pirate*0.4+shout*0.6"}]
    assert text not in [await text_of(stack, **other) for other in others]


async def test_scales_lead_from_the_base_to_the_adapter_and_beyond(stack: Stack) -> None:
    base, pirate = await text_of(stack), await text_of(stack, model="demo:pirate")
    number = (await numbers(stack))["pirate"]
    assert await text_of(stack, lora=[{"id": number, "scale": 0}]) == base
    assert await text_of(stack, model="demo:pirate*0") == base
    assert await text_of(stack, model="demo:pirate+shout*0") == pirate
    assert await text_of(stack, lora=[{"id": number, "scale": 0.001}]) == base
    for scale in (-1, 100):
        assert await text_of(stack, lora=[{"id": number, "scale": scale}], max_tokens=4) is not None


async def test_the_adapter_of_mistral_rs_may_not_contradict_the_model(stack: Stack) -> None:
    assert await text_of(stack, adapter="pirate") == await text_of(stack, model="demo:pirate", adapter="pirate")
    assert await text_of(stack, model="demo:pirate", adapter="pirate*0.5+pirate*0.5") == await text_of(
        stack, adapter="pirate"
    )
    for dialect, status in (("union", 400), ("mistral.rs", 422)):
        found, param, message = await refusal(stack, dialect, model="demo:pirate", adapter="shout")
        assert (found, param) in ((status, "adapter"), (status, None))
        assert '"adapter" must be absent beside "model", which selects "pirate" already' in message
    assert (await refusal(stack, adapter="nobody"))[:2] == (404, "adapter")
    listed = (await stack.get("/v1/models/demo:pirate")).json()["root"]
    assert await text_of(stack, adapter=listed) == await text_of(stack, adapter="pirate")
    assert (await refusal(stack, adapter="/etc/passwd"))[:2] == (403, "adapter")


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"lora": [{"id": 0, "scale": 1e9}]}, 400, "lora[0].scale", "from -100 to 100"),
        ({"lora": [{"id": 99, "scale": 0.5}]}, 404, "lora", "by their number, below 3; found 99"),
        ({"model": "demo:pirate*"}, 400, "model", "mix adapters as name*scale+name*scale"),
        ({"model": "demo:pirate*0.5+nobody"}, 404, "model", 'found "nobody"'),
        ({"adapter": "pirate", "lora_path": "pirate"}, 400, "adapter", 'beside "lora_path"'),
        ({"model": []}, 400, "model", "a list of 1 to 16"),
        ({"model": ["demo", "demo:nobody"]}, 404, "model[1]", '"model[1]" must name an adapter of "demo"'),
        ({"model": ["demo"] * 16, "n": 128, "prompt": ["a", "b"]}, 400, "n", "models times prompts times it"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    stack: Stack, body: dict[str, Any], status: int, param: str, message: str
) -> None:
    found = await refusal(stack, **body)
    assert found[:2] == (status, param)
    assert message in found[2]


MODELS = ["demo", "demo:pirate", "demo:pirate*0.6+shout*0.4", "demo:shout"]


@pytest.mark.law("Several models")
@pytest.mark.parametrize("seed", [None, 11])
async def test_each_model_of_a_list_answers_as_it_does_alone(stack: Stack, seed: int | None) -> None:
    """Greedy and drawn: choices, their log-probabilities, the reasons why they ended."""
    asked: dict[str, Any] = {"prompt": [PROMPT, "The owl said"], "n": 2, "max_tokens": 12, "logprobs": 2, "echo": True}
    asked |= {} if seed is None else {"temperature": 1.0, "seed": seed}
    together = await stack.complete(**asked, model=MODELS)
    assert together["model"] == ",".join(MODELS)
    assert [choice["index"] for choice in together["choices"]] == list(range(16))
    completion_tokens = 0
    for at, model in enumerate(MODELS):
        alone = await stack.complete(**asked, model=model)
        own = together["choices"][4 * at : 4 * at + 4]
        assert [choice["model"] for choice in own] == [model] * 4
        for choice, expected in zip(own, alone["choices"], strict=True):
            assert (choice["text"], choice["finish_reason"]) == (expected["text"], expected["finish_reason"])
            logprobs = [value for value in choice["logprobs"]["token_logprobs"] if value is not None]
            assert logprobs == pytest.approx(
                [value for value in expected["logprobs"]["token_logprobs"] if value is not None], abs=1e-4
            )
        completion_tokens += alone["usage"]["completion_tokens"]
    assert together["usage"]["completion_tokens"] == completion_tokens
    assert together["usage"]["prompt_tokens"] == 4 * alone["usage"]["prompt_tokens"]
    await stack.settled()


async def test_the_stream_of_a_list_adds_up_to_its_body(stack: Stack) -> None:
    asked: dict[str, Any] = {"model": MODELS, "prompt": PROMPT, "max_tokens": 10}
    body = await stack.complete(**asked)
    texts: dict[tuple[int, str], str] = {}
    for event in await stack.stream(**asked):
        assert event["model"] == body["model"]
        for choice in event["choices"]:
            key = (choice["index"], choice["model"])
            texts[key] = texts.get(key, "") + choice["text"]
    assert texts == {(choice["index"], choice["model"]): choice["text"] for choice in body["choices"]}


async def test_different_bases_answer_one_request_each_on_its_own_replicas() -> None:
    async with running_bases("demo", "twin") as app:
        asked: dict[str, Any] = {"prompt": [PROMPT, "The owl said"], "max_tokens": 8, "seed": 3}
        models = ["twin", "demo:pirate", "twin:shout*0.5", "demo"]
        response = await app.post({**asked, "model": models})
        assert response.status_code == 200, response.text
        body = response.json()
        for at, model in enumerate(models):
            alone = (await app.post({**asked, "model": model})).json()
            own = body["choices"][2 * at : 2 * at + 2]
            assert [choice["model"] for choice in own] == [model] * 2
            assert [choice["text"] for choice in own] == [choice["text"] for choice in alone["choices"]]
        refused = await app.post({"model": ["demo", "twin"], "prompt": [5] * 100, "max_tokens": 4})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith('Model "twin": ')
        ambiguous = await app.post({"model": ["demo", "pirate"], "prompt": "a"})
        assert (ambiguous.status_code, ambiguous.json()["error"]["param"]) == (400, "model[1]")
        for service in app.services:
            assert core_of(service).load.num_steps > 0
        async with asyncio.timeout(30):  # what the refusal took back from the other base is aborted behind it
            while any(service.num_open for service in app.services):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await app.settled()


async def test_a_replica_loads_an_adapter_once_however_many_mixes_there_are_of_it(stack: Stack) -> None:
    for scale in range(1, 9):
        await text_of(stack, model=f"demo:json*0.{scale}+pirate", max_tokens=1)
    assert all(core_of(service)._slots.num_loads <= 3 for service in stack.services)


async def test_a_mix_is_a_model_that_can_be_looked_up_and_is_not_listed(stack: Stack) -> None:
    entry = (await stack.get("/v1/models/demo:shout*0.4+pirate*0.6")).json()
    assert (entry["id"], entry["parent"]) == ("demo:pirate*0.6+shout*0.4", "demo")
    listed = (await stack.get("/v1/models")).json()["data"]
    assert not [each["id"] for each in listed if "*" in each["id"]]


async def test_the_native_shape_tells_scales_and_models(stack: Stack) -> None:
    lora = [{"id": 1, "scale": 0.5}]
    response = await stack.post({"prompt": PROMPT, "n_predict": 2, "lora": lora}, "/completion")
    assert response.json()["generation_settings"]["lora"] == lora
    response = await stack.post({"prompt": PROMPT, "n_predict": 2, "model": ["demo", "demo:shout"]}, "/completion")
    assert [result["model"] for result in response.json()] == ["demo", "demo:shout"]


async def test_a_request_for_several_models_is_one_line_in_the_log(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="serve_app.http.completions"):
        await stack.complete(prompt=PROMPT, max_tokens=2, model=MODELS[:2])
    [line] = [json.loads(record.message) for record in caplog.records if record.name == "serve_app.http.completions"]
    assert (line["model"], line["num_choices"], line["status"]) == ("demo,demo:pirate", 2, 200)
