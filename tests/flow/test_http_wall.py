"""What stands before the routes: packed bodies, origins, slashes, refusals in every dialect, headers that tell."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serve_app.http.app import build_app
from serve_app.http.settings import HttpSettings
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend, adapter_card, model_card, replica_card

BODY: dict[str, Any] = {"model": "tiny", "prompt": "one two", "max_tokens": 2}
PACKED = gzip.compress(json.dumps(BODY).encode(), mtime=0)  # every process gives its tests the same names
DIALECT_SHAPES = {
    "union": {"error"}, "openai": {"error"}, "mistral.rs": {"message"},
    "sglang": {"object", "message", "type", "param", "code", "error_code"},
}  # fmt: skip


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet("router-0")
    backend = FakeBackend(replica_card("r0", model_card("tiny", adapter_card("sql"))))
    fleet.put(backend.card, backend)
    yield fleet
    await fleet.close()


def client_of(fleet: Fleet, **settings: Any) -> httpx.AsyncClient:
    app = build_app(Router(fleet), HttpSettings(max_body_bytes=100_000, **settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(fleet) as client:
        yield client


async def post_packed(
    client: httpx.AsyncClient, content: Any, encoding: str = "gzip", path: str = "/v1/completions"
) -> httpx.Response:
    return await client.post(path, content=content, headers={"content-encoding": encoding})


async def in_pieces(content: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip"])
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_packed_body_is_read_however_it_arrives(client: httpx.AsyncClient, encoding: str, size: int) -> None:
    response = await post_packed(client, in_pieces(PACKED, size), encoding)
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, " p0s0w0 p0s0w1")


async def test_several_packed_streams_are_one_body(client: httpx.AsyncClient) -> None:
    plain = json.dumps(BODY).encode()
    content = gzip.compress(plain[:9]) + gzip.compress(b"") + gzip.compress(plain[9:])
    assert (await post_packed(client, content)).status_code == 200
    assert (await post_packed(client, gzip.compress(b'{"prompt": "a b"}'), path="/tokenize")).status_code == 200


async def test_a_small_body_that_unpacks_to_a_large_one_is_refused_as_a_large_one(client: httpx.AsyncClient) -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b" " * 1_000_000) for _ in range(50)) + packer.flush()
    assert len(bomb) < 100_000
    response = await post_packed(client, bomb)
    assert (response.status_code, response.json()["error"]["max_body_bytes"]) == (413, 100_000)


async def test_no_piece_of_an_unpacked_body_is_large() -> None:
    from serve_app.http.middleware import PIECE_BYTES, unpacked

    messages = [{"type": "http.request", "body": gzip.compress(b" " * 5_000_000), "more_body": False}]

    async def receive() -> Any:
        return messages.pop(0)

    read, _ = unpacked({"type": "http", "headers": [(b"content-encoding", b"gzip")]}, receive, receive)
    sizes = []
    while True:
        message = await read()
        sizes.append(len(message["body"]))
        if not message["more_body"]:
            break
    assert sum(sizes) == 5_000_000
    assert max(sizes) <= PIECE_BYTES


@pytest.mark.parametrize("content", [PACKED[:-12], b"", b"{}", PACKED[:20] + b"\x00" * 20])
@pytest.mark.parametrize("dialect", ["union", "mistral.rs"])
async def test_a_body_that_is_not_what_was_announced_is_refused(
    client: httpx.AsyncClient, content: bytes, dialect: str
) -> None:
    headers = {"content-encoding": "gzip", "x-completions-dialect": dialect}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert (response.status_code, set(response.json())) == (400 if dialect == "union" else 422, DIALECT_SHAPES[dialect])
    assert "gzip" in response.text


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "zstd"])
async def test_another_encoding_is_a_415_that_names_the_one_that_is_read(
    client: httpx.AsyncClient, encoding: str
) -> None:
    for path in ("/v1/completions", "/tokenize"):
        response = await post_packed(client, PACKED, encoding, path)
        assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip")
        assert response.json()["error"]["param"] == "Content-Encoding"
    assert (await post_packed(client, json.dumps(BODY).encode(), "identity")).status_code == 200


PREFLIGHT = {
    "origin": "https://app.example.org",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-completions-dialect",
}


async def test_pages_may_not_call_unless_their_origin_is_configured(fleet: Fleet) -> None:
    async with client_of(fleet) as client:
        refused = await client.options("/v1/completions", headers=PREFLIGHT)
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (405, False)
        answered = await client.post("/v1/completions", json=BODY, headers={"origin": PREFLIGHT["origin"]})
        assert "access-control-allow-origin" not in answered.headers
    async with client_of(fleet, cors_origins=("https://other.example.org",)) as client:
        refused = await client.options("/v1/completions", headers=PREFLIGHT)
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)


@pytest.mark.parametrize("origins", [("https://app.example.org",), ("*",)])
async def test_a_page_of_a_configured_origin_may_call_and_read(fleet: Fleet, origins: tuple[str, ...]) -> None:
    async with client_of(fleet, cors_origins=origins) as client:
        preflight = await client.options("/v1/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] in (PREFLIGHT["origin"], "*")
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "x-completions-dialect" in preflight.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in preflight.headers
        for body in (BODY, BODY | {"stream": True}, BODY | {"model": "nobody"}):
            answer = await client.post("/v1/completions", json=body, headers={"origin": PREFLIGHT["origin"]})
            assert answer.headers["access-control-allow-origin"] in (PREFLIGHT["origin"], "*")
            readable = answer.headers["access-control-expose-headers"].lower().split(", ")
            assert {"x-seed", "retry-after", "idempotency-replayed", "x-ratelimit-remaining-tokens"} <= {*readable}


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/completions//", "/completion/"])
async def test_a_route_may_be_called_with_a_slash_behind_it(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post(path, json=BODY)).status_code == 200
    assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()
    assert (await client.get("/v1/models/tiny:sql/")).json()["id"] == "tiny:sql"
    metrics = (await client.get("/metrics/")).text
    assert f'route="{path.rstrip("/")}"' in metrics
    assert (await client.get("//")).json() == (await client.get("/")).json()


@pytest.mark.parametrize(("dialect", "shape"), DIALECT_SHAPES.items())
async def test_what_no_route_answers_is_refused_in_the_dialect_that_was_asked_for(
    client: httpx.AsyncClient, dialect: str, shape: set[str]
) -> None:
    headers = {"X-Completions-Dialect": dialect.upper()}
    nowhere = await client.get("/v2/nothing", headers=headers)
    wrong = await client.get("/v1/completions", headers=headers)
    model = await client.get("/v1/models/nobody", headers=headers)
    steering = await client.post("/v1/completions", json=BODY, headers={**headers, "x-request-timeout-seconds": "9"})
    for response, status in ((nowhere, 404), (wrong, 405), (model, 404)):
        assert (response.status_code, response.headers["x-completions-dialect"]) == (status, dialect)
        assert shape <= set(response.json())
    assert wrong.headers["allow"] == "POST"
    assert (steering.status_code, set(steering.json())) == (422 if dialect == "mistral.rs" else 400, shape)


async def test_requests_that_would_steer_serve_are_counted(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json=BODY, headers={"x-request-disconnect-disabled": "1"})
    metrics = (await client.get("/metrics")).text
    (line,) = [
        each for each in metrics.splitlines() if each.startswith("serve_app_requests_total{") and "completions" in each
    ]
    assert 'status="400"' in line
    assert line.endswith(" 1.0")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_seed_is_told_whether_it_was_sent_or_drawn(client: httpx.AsyncClient, stream: bool) -> None:
    drawn = [
        int((await client.post("/v1/completions", json=BODY | {"stream": stream})).headers["x-seed"]) for _ in "ab"
    ]
    assert drawn[0] != drawn[1]
    assert all(0 <= seed < 2**53 for seed in drawn)
    sent = await client.post("/v1/completions", json=BODY | {"stream": stream, "seed": 7})
    assert sent.headers["x-seed"] == "7"
    native = await client.post("/completion", json=BODY)
    assert native.json()["generation_settings"]["seed"] == int(native.headers["x-seed"])


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_names_are_told_in_a_header_of_bounded_size(client: httpx.AsyncClient, stream: bool) -> None:
    body = BODY | {"stream": stream, "zzz": 1, "stream_options": {"odd[0]": 1}, "a\r\nx-evil: b, 猫": 1, "absent": None}
    response = await client.post("/v1/completions", json=body)
    assert response.headers["x-ignored-parameters"] == "zzz, a%0D%0Ax-evil%3A%20b%2C%20%E7%8C%AB, stream_options.odd[0]"
    many = await client.post("/v1/completions", json=BODY | {f"{i:03}{'é' * 200}": 1 for i in range(100)})
    told = many.headers["x-ignored-parameters"]
    assert len(told) <= 1010
    assert told.split(", ")[-1].startswith("+")
    refused = await client.post("/v1/completions", json=BODY | {"zzz": 1, "model": "nobody"})
    assert (refused.status_code, refused.headers["x-ignored-parameters"]) == (404, "zzz")
    assert "x-ignored-parameters" not in (await client.post("/v1/completions", json=BODY)).headers
