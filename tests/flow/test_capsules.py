"""GET /v1/capsules/{id}: what replicas keep of a completion, as what it takes to ask for it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest

from serve_app.api.dialects import UNION
from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.api.openapi import openapi_document
from serve_app.router.fleet import Fleet
from tests.fakes import FakeBackend, settle
from tests.flow.test_resuming import ASKED, app_of, kept_of, shown

PLAIN = {**ASKED, "stream": False}
WANTED = {"x-capsule": "true"}


@pytest.fixture
async def made() -> AsyncIterator[tuple[httpx.AsyncClient, Fleet, FakeBackend]]:
    client, fleet, replica = app_of()
    yield client, fleet, replica
    await client.aclose()
    await fleet.close()


async def captured(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    response = await client.get(f"/v1/capsules/{name}")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    document = openapi_document(DEFAULT_LIMITS, UNION)
    jsonschema.validate(found, {"$ref": "#/components/schemas/Capsule", "components": document["components"]})
    return found


async def test_a_capsule_has_the_request_as_it_was_resolved_and_what_came_of_it(
    made: tuple[httpx.AsyncClient, Fleet, FakeBackend],
) -> None:
    client, _, replica = made
    asked = {**ASKED, "n": 2, "temperature": 0.5, "logit_bias": [[5, False]], "stream_options": {"include_usage": True}}
    answer = await client.post("/v1/completions", json=asked, headers={"x-completions-dialect": "vllm"})
    kept = kept_of(replica)
    found = await captured(client, kept.id)
    assert (found["path"], found["dialect"], found["id"]) == ("/v1/completions", "vllm", kept.id)
    assert found["request"] == {
        "model": "tiny", "prompt": "a b c", "max_tokens": 12, "n": 2, "temperature": 0.5, "logit_bias": [[5, False]],
        "seed": int(answer.headers["x-seed"]),
    }  # fmt: skip
    [part] = found["parts"]
    assert (part["model"], part["prompt_tokens"], part["engine"]) == ("tiny", 3, "own")
    assert (part["sampling"]["seed"], part["sampling"]["temperature"]) == (found["request"]["seed"], 0.5)
    assert part["sampling"]["logit_bias"] == [[5, "-inf"]]
    assert part["stop"]["max_tokens"] == 12
    assert [each["text"] for each in part["choices"]] == [
        "".join(f" p0s{sample}w{at}" for at in range(12)) for sample in range(2)
    ]
    assert [(len(each["token_ids"]), each["finish_reason"]) for each in part["choices"]] == [(12, "length")] * 2


async def test_an_answer_that_is_no_stream_is_kept_where_its_client_wants_that(
    made: tuple[httpx.AsyncClient, Fleet, FakeBackend],
) -> None:
    client, _, replica = made
    for headers, status in ((WANTED, 200), ({}, 404)):
        answer = await client.post("/v1/completions", json=PLAIN, headers=headers)
        assert answer.headers.get("x-resumable") == ("true" if headers else None)
        assert (await client.get(f"/v1/capsules/{answer.json()['id']}")).status_code == status
        again = await client.get(f"/v1/completions/{answer.json()['id']}")
        assert again.status_code == status
        if headers:
            assert again.json() == answer.json()
    refused = await client.post("/v1/completions", json=PLAIN, headers={"x-capsule": "yes"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Capsule")
    assert replica.keeping.card.num_streams == 1


async def test_a_response_is_kept_where_its_client_wants_that_and_no_stream_of_one(
    made: tuple[httpx.AsyncClient, Fleet, FakeBackend],
) -> None:
    client, _, _ = made
    asked = {"model": "tiny", "input": "a b c", "max_output_tokens": 12, "temperature": 0.5}
    answer = await client.post("/v1/responses", json=asked, headers=WANTED)
    found = await captured(client, answer.json()["id"])
    assert (found["path"], found["id"]) == ("/v1/responses", answer.json()["id"])
    assert found["request"] == {**asked, "seed": int(answer.headers["x-seed"])}
    again = await client.post(found["path"], json=found["request"], headers=WANTED)
    assert (await captured(client, again.json()["id"]))["parts"] == found["parts"]
    fetched = await client.get(f"/v1/completions/{answer.json()['id']}")
    assert fetched.json()["output"][0]["content"] == answer.json()["output"][0]["content"]
    stream = await client.post("/v1/responses", json={**asked, "stream": True}, headers=WANTED)
    assert (stream.status_code, stream.headers["x-resumable"]) == (200, "false")


async def test_a_capsule_is_for_the_key_that_asked(made: tuple[httpx.AsyncClient, Fleet, FakeBackend]) -> None:
    client, _, replica = made
    await client.post("/v1/completions", json=ASKED)
    named = kept_of(replica).id
    other = await client.get(f"/v1/capsules/{named}", headers={"x-api-key": "b"})
    unknown = await client.get("/v1/capsules/cmpl-none", headers={"x-api-key": "b"})
    assert (other.status_code, other.text.replace(named, "cmpl-none")) == (404, unknown.text)


async def test_a_stream_that_runs_goes_on_undisturbed_where_a_capsule_of_it_is_made(
    made: tuple[httpx.AsyncClient, Fleet, FakeBackend],
) -> None:
    client, _, replica = made
    replica.is_stepped = True
    reading = asyncio.create_task(client.post("/v1/completions", json=ASKED))
    while not replica.num_live:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(5):
        replica.step()
        await settle()
    [part] = (await captured(client, kept_of(replica).id))["parts"]
    assert [(len(each["token_ids"]), each["finish_reason"]) for each in part["choices"]] == [(5, None)]
    while not reading.done():
        replica.step()
        await asyncio.sleep(0)
    assert shown(reading.result()) == "".join(f" p0s0w{at}" for at in range(12))
    assert (await client.get(f"/v1/completions/{kept_of(replica).id}")).status_code == 200, "nobody has claimed it"


async def test_what_is_asked_of_several_models_is_pinned_in_its_order(
    made: tuple[httpx.AsyncClient, Fleet, FakeBackend],
) -> None:
    client, _, replica = made
    for sent, meant in (
        ({"model": ["tiny:pirate", "tiny"], "prompt": ["a", "b"]}, ["tiny:pirate@v1", "tiny"]),
        ({"model": "tiny:pirate"}, "tiny:pirate@v1"),
        ({"model": "tiny", "lora_path": "pirate"}, "tiny"),
    ):
        await client.post("/v1/completions", json={**ASKED, **sent})
        found = await captured(client, kept_of(replica).id)
        assert found["request"]["model"] == meant
        again = await client.post(found["path"], json=found["request"], headers=WANTED)
        assert (await captured(client, again.json()["id"]))["parts"] == found["parts"]
