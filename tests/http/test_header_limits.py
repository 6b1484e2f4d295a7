"""Headers that come too slowly or are too large end their connection, and no others do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from serve_app.http.header_limits import BoundedHeaders

TIMEOUT_S = 20.0
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
MAX_BYTES = BoundedHeaders.max_header_bytes


class Hasty(BoundedHeaders):
    headers_timeout_s = 0.3


class Patient(BoundedHeaders):
    headers_timeout_s = 600.0


async def echo(request: Request) -> Response:
    return PlainTextResponse(await request.body())


async def echo_late(request: Request) -> Response:
    """Answers after the time in which Hasty wants the headers."""
    body = await request.body()
    await asyncio.sleep(2 * Hasty.headers_timeout_s)
    return PlainTextResponse(body)


@asynccontextmanager
async def connection(
    protocol: type[BoundedHeaders],
    *,
    app: Starlette | None = None,
    websockets: Literal["none", "websockets-sansio"] = "none",
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """To a server that speaks so, by default one that echoes: at once where headers may take their time."""
    app = app or Starlette(routes=[Route("/", echo if protocol is Patient else echo_late, methods=["POST"])])
    config = uvicorn.Config(app, port=0, http=protocol, ws=websockets, lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()

    def speak() -> asyncio.Protocol:
        return protocol(config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(speak, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield reader, writer
    finally:
        writer.close()
        server.close()
        await server.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The next response: its status and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


@pytest.mark.slow
async def test_headers_that_do_not_end_are_answered_and_the_connection_is_closed() -> None:
    async with connection(Hasty) as (reader, writer):
        writer.write(HEAD)
        status, body = await answer(reader)
        assert (status, code(body)) == (408, "headers_timeout")
        assert await reader.read() == b""


async def test_a_connection_over_which_nothing_comes_is_closed() -> None:
    async with connection(Hasty) as (reader, _):
        assert await reader.read() == b""


@pytest.mark.slow
async def test_a_body_and_its_answer_may_take_longer_than_headers() -> None:
    async with connection(Hasty) as (reader, writer):
        writer.write(HEAD + b"content-length: 4\r\n\r\nte")
        await asyncio.sleep(2 * Hasty.headers_timeout_s)
        writer.write(b"xt")
        assert await answer(reader) == (200, b"text")


@pytest.mark.slow
async def test_the_time_counts_anew_for_every_request_of_a_connection() -> None:
    async with connection(Hasty) as (reader, writer):
        writer.write(HEAD + b"content-length: 3\r\n\r\none")
        assert await answer(reader) == (200, b"one")
        await asyncio.sleep(2 * Hasty.headers_timeout_s)  # idle, which is the keep-alive timeout's affair
        writer.write(HEAD + b"content-length: 3\r\n\r\ntwo")
        assert await answer(reader) == (200, b"two")
        writer.write(b"POST")
        status, body = await answer(reader)
        assert (status, code(body)) == (408, "headers_timeout")


@pytest.mark.parametrize(
    "headers",
    [
        b"long: " + b"x" * (MAX_BYTES + 1),  # the parser shows none of it before it has ended
        b"long: " + b"x" * (MAX_BYTES + 1) + b"\r\n\r\n",
        b"many: " + b"x\r\nmany: " * (MAX_BYTES // 5),
        b"many: " + b"x\r\nmany: " * (MAX_BYTES // 5) + b"\r\n\r\n",
        b"a:\r\n" * (MAX_BYTES // 32) + b"\r\n",  # little text, and much to go through
    ],
)
async def test_headers_that_are_too_large_are_refused_whether_they_end_or_not(headers: bytes) -> None:
    async with connection(Patient) as (reader, writer):
        writer.write(HEAD + headers)
        status, body = await answer(reader)
        assert (status, code(body)) == (431, "headers_too_large")


async def test_headers_just_below_the_bound_and_a_body_above_it_are_taken() -> None:
    text = b"x" * (4 * MAX_BYTES)
    large = b"large: " + b"x" * (MAX_BYTES - 1000)
    async with connection(Patient) as (reader, writer):
        writer.write(HEAD + large + b"\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
        assert await answer(reader) == (200, text)


async def test_what_is_no_http_gets_the_answer_that_it_always_got() -> None:
    async with connection(Patient) as (reader, writer):
        writer.write(b"nonsense\r\n\r\n")
        assert await answer(reader) == (400, b"Invalid HTTP request received.")


@pytest.mark.parametrize("cut", [b"", b"\r\n", b"b: "], ids=["whole", "before a line ends", "within a trailer"])
async def test_trailers_behind_a_chunked_body_are_no_headers(cut: bytes) -> None:
    async def headers_behind_the_body(request: Request) -> Response:
        await request.body()
        return PlainTextResponse(json.dumps({name: value for name, value in request.headers.items() if name != "host"}))

    app = Starlette(routes=[Route("/", headers_behind_the_body, methods=["POST"])])
    sent = HEAD + b"x-api-key: mine\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    sent += b"x-api-key: another\r\nauthorization: Bearer other\r\nb: c\r\n\r\n"
    at = sent.rindex(cut) + len(cut) // 2 if cut else 0
    async with connection(Patient, app=app) as (reader, writer):
        for _ in range(2):  # the next request of the connection has headers again
            writer.write(sent[:at])
            await writer.drain()
            writer.write(sent[at:])
            status, body = await answer(reader)
            assert (status, json.loads(body)) == (200, {"x-api-key": "mine", "transfer-encoding": "chunked"})
