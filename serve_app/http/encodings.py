"""Unpacks bodies that were sent compressed."""

from __future__ import annotations

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.error_text import shown
from serve_app.core.errors import InvalidRequest, UnsupportedMediaType

NAME = "Content-Encoding"
GZIP = ("gzip", "x-gzip")
HONEST = "be the encoding of the request body"
PIECE_BYTES = 64 * 1024
GZIP_WINDOW = 16 + zlib.MAX_WBITS


class ContentEncodings:
    """ASGI middleware behind which a gzip body is a plain one, in pieces of bounded size.

    Whoever reads the body bounds it by what arrives there, so a small body that unpacks to a large one is refused as
    any large one is. Any other encoding is refused when the body is read, by UnsupportedMediaType; a damaged body by
    InvalidRequest.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoding = Headers(scope=scope).get(NAME, "").strip().lower() if scope["type"] == "http" else ""
        if encoding not in ("", "identity"):
            receive = Unpacked(receive).receive if encoding in GZIP else _refusing(encoding)
        await self._app(scope, receive, send)


class Unpacked:
    """A body that is unpacked as it is read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._stream = zlib.decompressobj(GZIP_WINDOW)
        self._packed = b""
        self._has_more = True
        self._is_over = False

    async def receive(self) -> Message:
        """The next piece. Raises InvalidRequest."""
        if self._is_over:
            return await self._receive()
        await asyncio.sleep(0)  # pieces of a body that is here already must not hold up everybody else
        while True:
            piece = self._next_piece()
            self._is_over = not piece and not self._has_more
            if self._is_over and not self._stream.eof:
                raise InvalidRequest.refusing(NAME, must=HONEST, found="gzip that ends too early")
            if piece or self._is_over:
                return {"type": "http.request", "body": piece, "more_body": not self._is_over}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._packed += message.get("body", b"")
            self._has_more = message.get("more_body", False)

    def _next_piece(self) -> bytes:
        """What is there already, in plain; empty where more has to be read."""
        while self._packed:
            if self._stream.eof:  # several streams may follow each other
                self._stream = zlib.decompressobj(GZIP_WINDOW)
            try:
                piece = self._stream.decompress(self._packed, PIECE_BYTES)
            except zlib.error:
                raise InvalidRequest.refusing(NAME, must=HONEST, found="bytes that are no gzip") from None
            self._packed = self._stream.unused_data or self._stream.unconsumed_tail
            if piece:
                return piece
        return b""


def _refusing(encoding: str) -> Receive:
    async def receive() -> Message:
        raise UnsupportedMediaType.refusing(NAME, must="be gzip or identity", found=shown(encoding))

    return receive
