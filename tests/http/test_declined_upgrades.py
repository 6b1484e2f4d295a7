"""A request that offers an upgrade is read as one that offers none, its body and what follows it too."""

from __future__ import annotations

import asyncio
import sys

import pytest
from httptools import HttpParserUpgrade
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from serve_app.http.declined_upgrades import OfferParser
from tests.http.test_header_limits import Patient, answer, connection

pytestmark = pytest.mark.slow

OFFER = (
    b"POST / HTTP/%s\r\nHost: x\r\n"
    b"Connection: Upgrade, HTTP2-Settings%s\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n%s\r\n"
)
COUNTED = b"Content-Length: 4\r\n"
IN_CHUNKS = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("version", "close", "framing", "body"),
    [
        (b"1.1", b"", COUNTED, b"text"),
        (b"1.1", b"", IN_CHUNKS, b"2\r\nte\r\n2\r\nxt\r\n0\r\n\r\n"),
        (b"1.1", b", close", COUNTED, b"text"),  # after such a head the parser takes nothing more by itself
        (b"1.1", b", close", IN_CHUNKS, b"4\r\ntext\r\n0\r\n\r\n"),
        (b"1.0", b"", COUNTED, b"text"),
    ],
)
@pytest.mark.parametrize("piece_size", [1, 7, 10_000])
async def test_the_body_after_an_offer_arrives_however_it_is_cut(
    version: bytes, close: bytes, framing: bytes, body: bytes, piece_size: int
) -> None:
    sent = OFFER % (version, close, framing) + body
    async with connection(Patient) as (reader, writer):
        for at in range(0, len(sent), piece_size):
            writer.write(sent[at : at + piece_size])
            await writer.drain()
            await asyncio.sleep(0)
        assert await answer(reader) == (200, b"text")
        if close or version == b"1.0":
            assert await reader.read() == b""


async def test_requests_that_follow_an_offer_in_one_piece_are_answered_in_their_order() -> None:
    plain = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
    offer = OFFER % (b"1.1", b"", COUNTED)
    async with connection(Patient) as (reader, writer):
        writer.write(plain + b"ab" + offer + b"text" + offer + b"more" + plain + b"cd")
        assert [await answer(reader) for _ in range(4)] == [(200, each) for each in (b"ab", b"text", b"more", b"cd")]


async def test_a_websocket_is_still_opened() -> None:
    async def greet(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    handshake = (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    app = Starlette(routes=[WebSocketRoute("/", greet)])
    async with connection(Patient, app=app, websockets="websockets-sansio") as (reader, writer):
        writer.write(handshake)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert await reader.readexactly(7) == b"\x81\x05hello"


class Heard:
    """Counts what its parser tells of requests with offers, and declines them or not."""

    def __init__(self, *, declines: bool) -> None:
        self.num_heads = 0
        self.bodies: list[bytes] = []
        self._declines = declines
        self._is_offer = False
        self.parser = OfferParser(self)

    def on_headers_complete(self) -> None:
        self._is_offer = self.parser.should_upgrade()
        self.num_heads += 1

    def on_body(self, body: bytes) -> None:
        self.bodies.append(bytes(body))

    def take_head(self) -> bytes | None:
        return b"POST / HTTP/1.1\r\n" + COUNTED + b"\r\n" if self._is_offer and self._declines else None


def test_as_many_offers_as_fit_into_one_piece_are_read() -> None:
    """However many: no recursion."""
    heard, num_offers = Heard(declines=True), 2 * sys.getrecursionlimit()
    heard.parser.feed_data((OFFER % (b"1.1", b"", COUNTED) + b"text") * num_offers)
    assert heard.num_heads == 2 * num_offers
    assert heard.bodies == [b"text"] * num_offers


def test_an_offer_that_is_not_declined_ends_the_requests() -> None:
    heard = Heard(declines=False)
    with pytest.raises(HttpParserUpgrade):
        heard.parser.feed_data(OFFER % (b"1.1", b"", COUNTED) + b"text")
    assert heard.bodies == []
