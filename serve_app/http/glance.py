"""What can be seen of a request without a connection's whole protocol: whether it is a plain one, and whose."""

from __future__ import annotations

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from serve_app.api.dialects import HEADER
from serve_app.api.paths import POSTED

MAX_BYTES = 16384
MAX_HEADERS = 64
COUNTED_URLS = frozenset(path.encode() for path in POSTED)
"""Of requests that compute something, as nearly all spell them."""
SPECIAL = frozenset({HEADER.lower().encode(), b"expect"})
"""Headers that want more than a glance."""


class Glance:
    """The parser's listener, and afterwards the request.

    headers: names in lower case, in their order;  is_last: whether its client sends no other over this connection
    """

    def __init__(self) -> None:
        self.parser = HttpRequestParser(self)
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_plain = True
        self.is_last = False
        self._num_begun = 0
        self._num_complete = 0
        self._url = b""

    @property
    def is_whole(self) -> bool:
        return self._num_begun == self._num_complete == 1 and self._url in COUNTED_URLS

    @property
    def request_id(self) -> str:
        return next((value.decode("latin-1") for name, value in self.headers if name == b"x-request-id"), "")

    def on_message_begin(self) -> None:
        self._num_begun += 1

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.is_plain = self.is_plain and name not in SPECIAL
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_last = self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self._num_complete += 1


def plain_post(data: bytes) -> Glance | None:
    """The request that this is, if it is one to compute something, whole, alone and without anything out of the
    ordinary. None for all else, which only the protocol itself can judge.
    """
    if len(data) > MAX_BYTES or not data.startswith(b"POST "):
        return None
    glance = Glance()
    try:
        glance.parser.feed_data(data)
    except (HttpParserError, HttpParserUpgrade):
        return None
    return glance if glance.is_whole and glance.is_plain and len(glance.headers) <= MAX_HEADERS else None
