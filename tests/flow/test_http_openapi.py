"""The description of the service, and a crowd of requests made from it: none may fail the server."""

from __future__ import annotations

import asyncio
import json
import os
import random

import httpx
import jsonschema
import pytest

from serve_app.api.chat import CHAT_PARAMETERS
from serve_app.api.dialects import DIALECTS
from serve_app.api.limits import WireLimits
from serve_app.api.parameters import PARAMETERS
from serve_app.http.admin_routes import refuse
from serve_app.http.app import build_app, routes
from serve_app.http.metrics import Metrics
from serve_app.http.settings import HttpSettings
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card
from tests.flow.maker import Maker

NUM_CASES = int(os.environ.get("OPENAPI_CASES", "400"))
NUM_SEEDS = 8
USER = {"role": "user", "content": "Hello"}


@pytest.fixture
async def app():
    fleet = Fleet("router-0")
    card = replica_card("r0", model_card("tiny", adapter_card("sql")))
    backend = FakeBackend(card)
    fleet.put(card, backend)
    yield build_app(Router(fleet), HttpSettings(max_body_bytes=200_000))
    await fleet.close()


@pytest.fixture
async def client(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def one_request(client: httpx.AsyncClient, document: dict, draw: random.Random) -> None:
    path, method, operation = draw.choice(
        [(path, method, each) for path, methods in document["paths"].items() for method, each in methods.items()]
    )
    maker = Maker(document, draw)
    arguments: dict = {"headers": {}}
    for each in operation.get("parameters", ()):
        value = draw.choice([*each["schema"].get("enum", ["tiny", "tiny:sql", "nobody", "a/b:c"]), "nobody"])
        if each["in"] == "path":
            path = path.replace("{id}", value)
        elif draw.random() < 0.5:
            arguments["headers" if each["in"] == "header" else "params"] = {each["name"]: value}
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = maker.value(schema)
        if isinstance(body, dict) and draw.random() < 0.7:
            body |= {"model": "tiny"} | ({"prompt": "Hello"} if "prompt" in body and "messages" not in body else {})
            body |= {name: draw.randint(0, 4) for name in ("n", "max_tokens") if name in body}
        arguments["content"] = json.dumps(body).encode()
        if draw.random() < 0.03:
            arguments["content"] = draw.choice([b"", b"{", b"\xff", b"NaN", b'{"prompt": 1e999}', b"[" * 2000])
    if draw.random() < 0.03:
        method = "PATCH"
    if draw.random() < 0.03:
        path += "/"
    async with asyncio.timeout(60):
        response = await client.request(method, path, **arguments)
    seen = f"{method} {path} {arguments}"[:2000]
    is_answered = response.status_code < 500 or response.status_code == 501  # of a model that fills no gaps
    assert is_answered, f"{response.status_code} {response.text[:500]} for {seen}"
    assert str(response.status_code) in operation["responses"], f"{response} for {seen}"
    answered = operation["responses"][str(response.status_code)]["content"]
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in answered, seen
    if "schema" in answered[kind] and kind == "application/json":
        jsonschema.validate(response.json(), {**answered[kind]["schema"], "components": document["components"]})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
async def test_no_request_made_from_the_description_fails_or_hangs_the_server(client, seed):
    document = (await client.get("/openapi.json")).json()
    draw = random.Random(seed)
    for _ in range(NUM_CASES // NUM_SEEDS):
        await one_request(client, document, draw)
    response = await client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 2})
    assert response.json()["choices"][0]["text"] == " p0s0w0 p0s0w1"


async def test_every_parameter_is_described_with_its_type_range_and_default(client):
    document = (await client.get("/openapi.json")).json()
    request = document["components"]["schemas"]["CompletionRequest"]
    assert set(request["properties"]) == set(PARAMETERS)
    assert set(document["components"]["schemas"]["ChatRequest"]["properties"]) == set(CHAT_PARAMETERS)
    assert request["required"] == ["model", "prompt"]
    assert request["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert request["properties"]["n"]["anyOf"][0]["maximum"] == 128
    assert request["properties"]["max_tokens"]["default"] == 16
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize(
    ("path", "schema", "asked"),
    [
        ("/v1/completions", "CompletionRequest", {"prompt": "Hi"}),
        ("/v1/chat/completions", "ChatRequest", {"messages": [USER]}),
    ],
)
async def test_described_defaults_are_accepted_where_they_are_sent(dialect, path, schema, asked):
    fleet = Fleet("router-0")
    backend = FakeBackend()
    fleet.put(backend.card, backend)
    transport = httpx.ASGITransport(build_app(Router(fleet, RouterConfig(dialect=dialect))))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        properties = (await client.get("/openapi.json")).json()["components"]["schemas"][schema]["properties"]
        defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
        assert len(defaults) > 60
        body = {**defaults, "model": "tiny", **asked}
        response = await client.post(path, json=body)
    await fleet.close()
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "Hi", "model": None, "n_predict": 1}),
        ("/completion", {"prompt": "Hi", "model": 5}),
        ("/v1/completions", {"prompt": "Hi", "model": None}),
        ("/v1/completions", {"prompt": "Hi", "model": "tiny", "max_tokens": -1}),
        ("/v1/completions", {"prompt": "Hi", "model": "tiny", "max_tokens": 0}),
        ("/v1/completions", {"prompt": "Hi", "model": "tiny", "max_tokens": -2}),
        ("/tokenize", {"content": "a", "prompt": None}),
        ("/tokenize", {"content": None, "prompt": "a"}),
        ("/tokenize", {"content": "a", "prompt": "a"}),
        ("/tokenize", {"content": None}),
        ("/tokenize", {"content": "a", "add_special": None, "add_special_tokens": True}),
        ("/tokenize", {"content": "a", "add_special": False, "add_special_tokens": True}),
        ("/tokenize", {"content": "a", "odd": None}),
        ("/detokenize", {"tokens": [97.0], "odd": None}),
        ("/detokenize", {"tokens": [97.5]}),
        ("/detokenize", {"tokens": [97], "odd": 1}),
        ("/tokenize", {"messages": [USER]}),
        ("/tokenize", {"messages": [USER], "content": "a"}),
        ("/tokenize", {"messages": [USER], "content": None, "add_generation_prompt": False}),
        ("/tokenize", {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"content": "a", "add_generation_prompt": True}),
        ("/tokenize", {"content": "a", "chat_template_kwargs": None}),
        ("/apply-template", {"messages": [USER]}),
        ("/apply-template", {"messages": [USER], "chat_template_kwargs": {"a": 1}, "model": None}),
        ("/apply-template", {"messages": [USER], "odd": 1}),
        ("/apply-template", {"messages": [{"role": "bot", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [USER], "model": "tiny"}),
        ("/v1/chat/completions", {"messages": [USER], "model": "tiny", "prompt": "a"}),
        ("/v1/chat/completions", {"messages": [USER]}),
    ],
)
async def test_a_body_is_accepted_exactly_where_the_description_allows_it(client, path, body):
    document = (await client.get("/openapi.json")).json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    response = await client.post(path, json=body)
    assert response.status_code == (200 if validator.is_valid(body) else 400), response.text


@pytest.mark.parametrize(
    ("path", "num_before"), [("/v1/completions", 0), ("/completion", 0), ("/v1/chat/completions", 1)]
)
async def test_every_event_of_a_stream_is_what_is_described(client, path, num_before):
    document = (await client.get("/openapi.json")).json()
    described = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
    kinds = described["properties"]["data"].get("anyOf", [described["properties"]["data"]])
    ends = {kind["const"] for kind in kinds if "const" in kind}
    (content,) = [kind["contentSchema"] for kind in kinds if "contentSchema" in kind]
    asked = {"messages": [USER]} if num_before else {"prompt": "Hi"}
    response = await client.post(path, json={"model": "tiny", **asked, "max_tokens": 3, "stream": True})
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n")[:-1]]
    assert len(events) == 3 + num_before + len(ends)
    assert set(events) & {"[DONE]"} == ends
    for event in events:
        if event not in ends:
            jsonschema.validate(json.loads(event), {**content, "components": document["components"]})


async def test_the_described_routes_are_those_that_exist(client):
    document = (await client.get("/openapi.json")).json()
    router = Router(Fleet("router-2"))
    existing = {
        route.path.replace(":path", ""): route.methods - {"HEAD"}
        for route in routes(router, HttpSettings(), Metrics(router.fleet))
        if route.endpoint is not refuse
    }
    described = {path: {method.upper() for method in operations} for path, operations in document["paths"].items()}
    assert described == existing


async def test_the_listing_of_dialects_tells_the_limits_that_are_configured() -> None:
    settings = HttpSettings(limits=WireLimits(max_logprobs=33, max_n=3))
    transport = httpx.ASGITransport(build_app(Router(Fleet("router-2")), settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        listing = (await client.get("/v1/dialects")).json()
        document = (await client.get("/openapi.json")).json()
    described = document["components"]["schemas"]["CompletionRequest"]["properties"]
    for dialect in listing["data"]:
        assert dialect["parameters"]["n"]["allowed"] == "an integer from 1 to 3"
        assert dialect["parameters"]["top_logprobs"]["allowed"] == "an integer from 0 to 33"
    assert "an integer from 0 to 33" in described["top_logprobs"]["description"]


async def test_what_a_browser_form_and_a_slow_model_are_told_is_described_too(client):
    document = (await client.get("/openapi.json")).json()
    completions = document["paths"]["/v1/completions"]["post"]
    assert {"403", "404", "405", "408", "413", "415", "422", "503", "504"} <= set(completions["responses"])
    assert "switches Mirostat 2 on" in json.dumps(document["components"]["schemas"]["CompletionRequest"])
    loading = httpx.ASGITransport(build_app(Router(Fleet("router-1"))))
    async with httpx.AsyncClient(transport=loading, base_url="http://test") as idle:
        for path in ("/health", "/v1/health", "/ready"):
            response = await idle.get(path)
            schema = document["paths"][path]["get"]["responses"]["503"]["content"]["application/json"]["schema"]
            assert response.status_code == 503
            jsonschema.validate(response.json(), {**schema, "components": document["components"]})


async def test_the_page_is_the_consoles_and_runs_its_scripts_alone(client):
    response, console = await client.get("/docs"), await client.get("/console")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert response.content == console.content
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["content-security-policy"] == console.headers["content-security-policy"]
