"""POST /v1/completions from bytes to bytes, with a backend in memory."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from serve_app.api.completion import CompletionRequest
from serve_app.api.listings import ModelEntry
from serve_app.core.errors import ContextOverflow, Overloaded
from serve_app.core.tenants import Tenant
from serve_app.http.app import build_app
from serve_app.http.settings import HttpSettings
from serve_app.router.admission import Ticket
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router, RouterConfig
from serve_app.router.run import Run, RunSettings
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card

BODY = {"model": "tiny", "prompt": "Hello there", "max_tokens": 2}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(replica_card("r0", model_card("tiny", adapter_card("sql"))))


@pytest.fixture
async def fleet(backend) -> AsyncIterator[Fleet]:
    fleet = Fleet("router-0", aliases={"fast": "tiny:sql"})
    fleet.put(backend.card, backend)
    fleet.expect(["tiny", "big"])
    yield fleet
    await fleet.close()


@pytest.fixture
async def client(fleet) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(Router(fleet), HttpSettings(max_body_bytes=10_000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def test_a_completion_is_answered_whole(client):
    response = await client.post("/v1/completions", json=BODY)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-completions-dialect"] == "union"
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": " p0s0w0 p0s0w1",
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_a_completion_is_streamed(client):
    response = await client.post(
        "/v1/completions", json=BODY | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-completions-dialect"] == "union"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == [" p0s0w0", " p0s0w1"]
    assert chunks[-1]["usage"]["total_tokens"] == 4


@pytest.mark.parametrize("model", ["tiny:sql", "fast"])
async def test_the_model_is_told_back_as_it_was_sent(client, model):
    body = (await client.post("/v1/completions", json=BODY | {"model": model})).json()
    assert body["model"] == model
    assert body["choices"][0]["text"].startswith(" sql-")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"temperature": 3}, 400, "invalid_value", "temperature"),
        ({"prompt": [[]]}, 400, "invalid_value", "prompt[0]"),
        ({"prompt": [1, 5000]}, 400, "invalid_value", "prompt"),
        ({"suffix": "x", "suffix_mode": "fim"}, 400, "invalid_value", "suffix_mode"),
        ({"max_tokns": 3}, 400, "unsupported_parameter", "max_tokns"),
        ({"model": "nobody"}, 404, "model_not_found", "model"),
        ({"model": "tiny:nobody"}, 404, "adapter_not_found", "model"),
        ({"model": "big"}, 503, "model_loading", "model"),
    ],
)
async def test_what_is_known_before_the_first_token_is_an_http_status(client, stream, change, status, code, param):
    response = await client.post("/v1/completions", json=BODY | {"stream": stream} | change)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["error_code"]) == (status, status, code)
    assert error["param"] == param
    assert ("retry-after" in response.headers) == (status == 503)
    assert response.headers["x-completions-dialect"] == "union"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "type_", "facts"),
    [
        (Overloaded("full", None, {"retry_after_s": 1.5}), 503, "unavailable_error", {"retry_after_s": 1.5}),
        (
            ContextOverflow("too long", "prompt", {"n_prompt_tokens": 600, "n_ctx": 512}),
            400,
            "exceed_context_size_error",
            {"n_prompt_tokens": 600, "n_ctx": 512},
        ),
    ],
)
async def test_a_refusal_of_the_replica_is_an_http_status(client, backend, stream, refusal, status, type_, facts):
    backend.refusal = refusal
    response = await client.post("/v1/completions", json=BODY | {"stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (status, type_)
    assert facts.items() <= error.items()
    if status == 503:
        assert response.headers["retry-after"] == "2"


async def test_a_request_over_its_time_is_a_504(fleet, backend):
    backend.is_stepped = True
    app = build_app(Router(fleet, RouterConfig(run=RunSettings(timeout_s=0.01))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post("/v1/completions", json=BODY)
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"


@pytest.mark.parametrize(("server_s", "client_s", "told"), [(600.0, "0.01", "0.01 s"), (0.01, "9", "0.01 s")])
async def test_a_client_may_give_its_request_less_time_and_no_more(fleet, backend, server_s, client_s, told):
    backend.is_stepped = True
    app = build_app(Router(fleet, RouterConfig(run=RunSettings(timeout_s=server_s))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post("/v1/completions", json=BODY, headers={"x-request-timeout": client_s})
    assert response.status_code == 504
    assert told in response.json()["error"]["message"]
    assert len(backend.aborted) == 1, "nobody computes what nobody waits for"


@pytest.mark.parametrize("found", ["0", "-1", "nan", "inf", "soon", "30s", ""])
async def test_a_time_that_is_none_is_refused(client, backend, found):
    response = await client.post("/v1/completions", json=BODY, headers={"x-request-timeout": found})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "X-Request-Timeout")
    assert f'found "{found}"' in error["message"]
    assert not backend.submissions


class BrokenRouter(Router):
    """Has a bug, whoever looks at it."""

    def seen_by(self, tenant: Tenant) -> Router:
        return self

    def open(self, request: CompletionRequest, ticket: Ticket | None = None) -> Run:
        raise ZeroDivisionError("a detail of ours")

    def models(self) -> list[ModelEntry]:
        raise ZeroDivisionError("a detail of ours")


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models")])
async def test_a_failure_nobody_foresaw_is_a_500_whose_details_are_logged_only(fleet, caplog, method, path):
    transport = httpx.ASGITransport(build_app(BrokenRouter(fleet)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.request(method, path, json=BODY, headers={"x-request-id": "r-9"})
    assert response.status_code == 500
    assert response.json()["error"]["error_code"] == "engine_failed"
    assert "detail" not in response.text
    (failure,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert "r-9" in failure.message
    assert failure.exc_info is not None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model":"tiny","prompt":"a","top_p":NaN}', b"\xff", b"[" * 9000])
async def test_a_body_that_is_no_json_object_is_a_400(client, body):
    response = await client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/jsonp", 415),
    ],
)
async def test_only_json_is_read(client, content_type, status):
    response = await client.post("/v1/completions", content=json.dumps(BODY), headers={"content-type": content_type})
    assert response.status_code == status
    if status == 415:
        assert response.json()["error"]["error_code"] == "unsupported_media_type"


async def test_a_body_without_a_content_type_is_taken_for_json(client):
    response = await client.post("/v1/completions", content=json.dumps(BODY).encode())
    assert "content-type" not in response.request.headers
    assert response.status_code == 200


async def pieces(num_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(num_bytes // 1000):
        yield b" " * 1000


async def test_a_body_over_the_limit_is_a_413_whether_announced_or_not(client):
    for content in (b" " * 10_001, pieces(11_000)):
        response = await client.post("/v1/completions", content=content)
        assert response.status_code == 413
        error = response.json()["error"]
        assert (error["error_code"], error["max_body_bytes"]) == ("payload_too_large", 10_000)
        assert response.headers["connection"] == "close"


@pytest.mark.parametrize("length", ["x", "-1", "1e3", "9" * 40])
async def test_a_content_length_that_is_no_size_is_refused(client, length):
    response = await client.post("/v1/completions", content=b"{}", headers={"content-length": length})
    assert response.status_code == (413 if length.isdigit() else 400)


async def test_the_dialect_that_was_asked_for_is_spoken_and_named(client):
    for name in ("union", "openai", "llama.cpp"):
        response = await client.post("/v1/completions", json=BODY, headers={"X-Completions-Dialect": name})
        assert (response.status_code, response.headers["x-completions-dialect"]) == (200, name)


async def test_an_unknown_dialect_is_refused_in_the_services_own(client):
    response = await client.post("/v1/completions", json=BODY, headers={"X-Completions-Dialect": "telepathy"})
    assert (response.status_code, response.headers["x-completions-dialect"]) == (400, "union")
    assert response.json()["error"]["param"] == "X-Completions-Dialect"


@pytest.mark.parametrize(
    ("sent", "is_kept"), [("req-7.a:b_c", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("<>", False)]
)
async def test_a_well_formed_request_id_is_echoed_and_any_other_replaced(client, sent, is_kept):
    response = await client.post("/v1/completions", json=BODY, headers={"X-Request-Id": sent})
    assert (response.headers["x-request-id"] == sent) == is_kept
    assert response.headers.get_list("x-request-id") == [response.headers["x-request-id"]]


async def test_the_request_id_is_left_to_a_server_that_sends_its_own(fleet):
    app = build_app(Router(fleet), HttpSettings(sends_request_id=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post("/v1/completions", json=BODY)
    assert "x-request-id" not in response.headers


async def test_each_request_is_logged_in_one_line_without_its_text(client, caplog):
    caplog.set_level(logging.INFO, logger="serve_app.http.completions")
    body = BODY | {"prompt": ["my secret", "another secret"], "n": 2, "user": "team-7"}
    response = await client.post("/v1/completions", json=body, headers={"x-request-id": "r-1"})
    await client.post("/v1/completions", json=body | {"prompt": ["a secret", 1.5]})
    first, second = (json.loads(record.message) for record in caplog.records)
    assert first["duration_s"] >= 0
    assert {key: first[key] for key in first if key not in {"time", "duration_s"}} == {
        "event": "completion",
        "request_id": "r-1",
        "response_id": response.json()["id"],
        "status": 200,
        "model": "tiny",
        "served": "tiny",
        "stream": False,
        "num_prompts": 2,
        "num_choices": 4,
        "user": "team-7",
        "prompt_tokens": 4,
        "cached_tokens": 2,
        "completion_tokens": 8,
        "finish_reasons": {"length": 4},
    }
    assert (second["status"], second["error_code"], second["param"]) == (400, "invalid_value", "prompt[1]")
    assert "secret" not in caplog.text
