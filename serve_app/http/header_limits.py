"""Bounds how long a client may take over a request's headers, and how large they may be, before anything reads them.

Serve starts its HTTP server without either bound, and no setting of it reaches them.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from serve_app.http.arrival import Arrival
from serve_app.http.declined_upgrades import DecliningUpgrades

HEADERS_TIMEOUT_S = 20.0
MAX_HEADER_BYTES = 64 * 1024
HEADER_OVERHEAD_BYTES = 32
"""That each header counts for besides its text, as HTTP/2 has it (RFC 7541 §4.1): tens of thousands of empty ones would
cost proxy and router a tenth of a second."""
LINGER_S = 1.0
"""For what a refused client still sends: closed with unread bytes, a socket takes the answer back."""


class HeadersTooLarge(Exception):
    """Raised through the parser, which then reads no further."""


class BoundedHeaders(DecliningUpgrades):
    """uvicorn's protocol without upgrades, which closes a connection whose headers take too long or are too large.

    The time counts from the connection, or from the first byte of a later request on it. A client that has sent
    something is told why, in the shape of every other error.

    arrival: of a connection that others have listened to before
    """

    headers_timeout_s = HEADERS_TIMEOUT_S
    max_header_bytes = MAX_HEADER_BYTES

    def __init__(self, *args: Any, arrival: Arrival | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrival = arrival
        self._deadline: asyncio.TimerHandle | None = None  # while headers are awaited
        self._num_received = 0  # bytes since then, that of the chunk left out in which a later request begins
        self._num_parsed = 0  # bytes of the URL and of headers that have ended
        self._has_begun = False
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._arrival is None:
            self._await_headers(self.headers_timeout_s)
            return
        self._await_headers(self._arrival.headers_s)
        self._arrival.end()
        self.data_received(self._arrival.data)
        if self.flow.read_paused:  # a transport begins to read behind this, whatever it was told here
            self.loop.call_soon(self._pause_again)

    def _pause_again(self) -> None:
        if self.flow.read_paused and not self.transport.is_closing():
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        deadline = self._deadline
        super().data_received(data)
        if deadline is None or deadline is not self._deadline or self._is_refused:
            return
        self._num_received += len(data)
        if self._num_received > self.max_header_bytes:
            self._refuse_large_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        if self._deadline is None:
            self._await_headers(self.headers_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count it, and keep it as a header unless it is a trailer behind a chunked body (RFC 9110 §6.5.1)."""
        self._count(len(name) + len(value) + HEADER_OVERHEAD_BYTES)
        if self._deadline is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._await_nothing()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser refused, or `_count` did."""
        if self._num_parsed > self.max_header_bytes:
            self._refuse_large_headers()
        else:
            super().send_400_response(msg)

    def _count(self, num_bytes: int) -> None:
        self._num_parsed += num_bytes
        if self._num_parsed > self.max_header_bytes:
            raise HeadersTooLarge

    def _await_headers(self, seconds: float) -> None:
        self._num_received = self._num_parsed = 0
        self._deadline = self.loop.call_later(seconds, self._refuse_slow_headers)

    def _await_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._has_begun = False
        self._num_parsed = 0  # what follows are trailers of a body

    def _refuse_slow_headers(self) -> None:
        if self._has_begun:
            self._refuse(408, "headers_timeout", f"The headers took longer than {self.headers_timeout_s:g} s.")
        else:
            self.transport.close()

    def _refuse_large_headers(self) -> None:
        self._refuse(431, "headers_too_large", f"The headers are larger than {self.max_header_bytes} bytes.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self._await_nothing()
        self._is_refused = True
        self.loop.call_later(LINGER_S, self.transport.close)
