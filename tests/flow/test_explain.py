"""POST /v1/explain: what it says a request would do is what the request does, and it asks nobody to do it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from serve_app.api.dialects import UNION
from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.api.openapi import openapi_document
from tests.engine.harness import core_of
from tests.flow.house import House
from tests.flow.stack import Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
LONG = "the owl " * 1200
FITS = {"context_length_exceeded_behavior": "truncate"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(num_replicas=1, max_num_sequences=8) as running:
        yield running


async def explained(stack: Stack, **body: Any) -> dict[str, Any]:
    before = core_of(stack.services[0]).load.num_steps
    response = await stack.post({"model": "demo", **body}, "/v1/explain")
    assert response.status_code == 200, response.text
    assert core_of(stack.services[0]).load.num_steps == before, "nothing runs"
    found: dict[str, Any] = response.json()
    return found


BODIES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time"},
    {"prompt": "Once upon a time", "max_tokens": 5, "n": 2, "add_special_tokens": False},
    {"prompt": ["a", "The owl sat on a", [5, 6, 7]], "max_tokens": 3},
    {"prompt": "The owl", "model": ["demo", "demo:pirate", "demo:pirate*0.5+shout*0.5"], "max_tokens": 2},
    {"prompt": LONG, "truncate_sequence": True, "max_tokens": 9},
    {"prompt": LONG, "truncate_sequence": True, "max_tokens": 9, **FITS},
    {"prompt": LONG, "truncate_prompt_tokens": 100, "max_tokens": 4},
    {"prompt": "x", "truncate_prompt_tokens": -1, "max_tokens": 4},
    {"messages": [{"role": "user", "content": "What does the cow say?"}], "max_tokens": 6},
]


@pytest.mark.parametrize("name", ["prompt", "messages"])
async def test_what_is_too_long_to_be_cut_into_tokens_is_named_as_the_client_does(stack: Stack, name: str) -> None:
    long = "a" * 3_000_000
    sent = long if name == "prompt" else [{"role": "user", "content": long}]
    response = await stack.post({"model": "demo", name: sent, "truncate_sequence": True}, "/v1/explain")
    assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text[:300]
    assert "max_tokenized_chars" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: ", ".join(sorted(body)))
async def test_what_is_explained_is_what_happens(stack: Stack, body: dict[str, Any]) -> None:
    told = await explained(stack, **body)
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    asked = {"model": "demo", "ignore_eos": True, **body}
    answer = (await stack.post(asked, route)).json()
    assert told["choices"] == len(answer["choices"])
    assert sum(part["kept_prompt_tokens"] for part in told["parts"]) == answer["usage"]["prompt_tokens"]
    at_most = sum(part["completions"] * part["max_completion_tokens"] for part in told["parts"])
    assert at_most == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG},
        {"prompt": "Once", "max_tokens": 4000, "context_length_exceeded_behavior": "error"},
        {"prompt": LONG, "max_tokens": 0},
    ],
    ids=["prompt", "completion", "scored"],
)
async def test_what_a_model_would_refuse_is_told_with_the_reason(stack: Stack, body: dict[str, Any]) -> None:
    (part,) = (await explained(stack, **body))["parts"]
    refused = await stack.post({"model": "demo", **body})
    assert refused.status_code == 400
    assert part["refused_because"] is not None
    assert part["cost_at_most"] == 0
    assert str(part["prompt_tokens"]) in refused.text


async def test_a_model_is_resolved_to_its_adapters_and_their_versions(stack: Stack) -> None:
    (part,) = (await explained(stack, model="demo:shout*0.5+pirate*0.5", prompt="x"))["parts"]
    assert (part["base"], part["model"]) == ("demo", "demo:pirate*0.5+shout*0.5")
    assert {(each["name"], each["scale"]) for each in part["adapters"]} == {("pirate", 0.5), ("shout", 0.5)}
    assert all(each["version"] for each in part["adapters"])


async def test_each_parameter_is_told_with_where_its_value_is_from(stack: Stack) -> None:
    response = await stack.post(
        {"model": "demo", "prompt": "x", "n_predict": 7, "temperature": 0.25, "made_up_name_of_mine": 1},
        "/v1/explain",
        dialect="llama.cpp",
    )
    told = response.json()
    values = {name: (each["value"], each["from"]) for name, each in told["parameters"].items()}
    assert values["max_tokens"] == (7, "body")
    assert values["temperature"] == (0.25, "body")
    assert values["top_k"] == (40, "dialect")
    assert values["presence_penalty"] == (0.0, "default")
    assert told["ignored_parameters"] == ["made_up_name_of_mine"]
    assert told["dialect"] == "llama.cpp"


async def test_what_only_a_computation_would_show_is_not_guessed(stack: Stack) -> None:
    (part,) = (await explained(stack, prompt="The ", suffix=" end", suffix_mode="fim"))["parts"]
    assert (part["prompt_tokens"], part["max_completion_tokens"]) == (None, None)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": "x", "temperature": 9}, "temperature"), ({"prompt": "x", "model": "nobody"}, "model"), ({}, "prompt")],
)
async def test_what_the_door_would_refuse_is_refused_alike(stack: Stack, body: dict[str, Any], param: str) -> None:
    asked = {"model": "demo", **body}
    explained, answered = await stack.post(asked, "/v1/explain"), await stack.post(asked)
    assert (explained.status_code, explained.json()) == (answered.status_code, answered.json())
    assert explained.json()["error"]["param"] == param


async def test_its_answer_is_as_openapi_describes_it(stack: Stack) -> None:
    document = openapi_document(DEFAULT_LIMITS, UNION)
    schema = {**document["components"]["schemas"]["Explanation"], "components": document["components"]}
    for body in ({"prompt": LONG}, {"prompt": "x", "model": "demo:pirate"}, {"prompt": "x", "suffix": "y"}):
        jsonschema.validate(await explained(stack, **body), schema)


async def test_it_obeys_the_door_as_a_completion_does(tmp_path: Path) -> None:
    house = House(tmp_path)
    key = house.key("acme", models=["tiny:sql"], max_tokens=8)
    transport = httpx.ASGITransport(house.app)
    async with house.kept_open(), httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def ask(headers: dict[str, str], **body: Any) -> httpx.Response:
            asked = {"model": "tiny:sql", "prompt": "four", "max_tokens": 4, **body}
            return await client.post("/v1/explain", json=asked, headers=headers)

        assert (await ask({})).status_code == 401
        assert (await ask({"authorization": f"Bearer {house.admin}"})).status_code == 403
        assert (await ask(key, model="tiny")).status_code == 404
        too_long = await ask(key, max_tokens=9)
        assert "at most 8 with this key" in too_long.json()["error"]["message"]
        assert (await ask(key)).json()["parts"][0]["max_completion_tokens"] == 4
        assert house.backend.submissions == []
    house.store.close()
