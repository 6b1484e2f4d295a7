"""Over real sockets, behind the server that Serve uses: old clients, and clients that offer an upgrade."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from tests.fakes import FakeBackend

BODY = json.dumps({"model": "tiny", "prompt": "one two", "max_tokens": 3, "stream": True}).encode()


PARSERS: dict[str, Any] = {"httptools": HttpToolsProtocol, "h11": H11Protocol}


@pytest.fixture(params=PARSERS)
def parser(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def address(parser: str) -> AsyncIterator[tuple[str, int]]:
    """Where the service listens, behind either of the parsers that uvicorn has."""
    fleet = Fleet("router-0")
    backend = FakeBackend()
    fleet.put(backend.card, backend)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(build_app(Router(fleet)), http=PARSERS[parser], lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()
    server.should_exit = True
    await serving
    await fleet.close()


async def talk(address: tuple[str, int], headers: Mapping[str, str], version: str = "1.1") -> tuple[str, bytes]:
    """The head and the body of the answer, read until the server closes."""
    reader, writer = await asyncio.open_connection(*address)
    lines = [f"POST /v1/completions HTTP/{version}", "Host: flow", f"Content-Length: {len(BODY)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + BODY)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode().lower(), body


async def test_a_stream_for_http_1_0_has_no_chunks(address: tuple[str, int]) -> None:
    head, body = await talk(address, {}, version="1.0")
    assert head.split("\r\n")[0].split(" ")[1] == "200"
    assert "transfer-encoding" not in head
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == " p0s0w0 p0s0w1 p0s0w2"
    assert f"content-length: {len(body)}" in head


async def test_a_body_lost_to_an_upgrade_is_named_and_one_that_is_there_is_read(
    address: tuple[str, int], parser: str
) -> None:
    offer = {"Connection": "Upgrade, HTTP2-Settings, close", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAoAAA"}
    head, body = await talk(address, offer)
    status = head.split("\r\n")[0].split(" ")[1]
    if parser != "httptools":
        assert (status, body.count(b"data: ")) == ("200", 4)
        return
    assert (status, "connection: close" in head) == ("400", True)
    error = json.loads(body)["error"]
    assert (error["param"], error["error_code"]) == ("Upgrade", "body_lost")
    assert "--http1.1" in error["message"]
