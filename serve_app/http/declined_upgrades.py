"""Declines offers to upgrade a connection, so that the body of the request that made one is read."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class DecliningUpgrades(HttpToolsProtocol):
    """uvicorn's protocol, to which a request that offers an upgrade is one that offers none (RFC 9110 §7.8).

    curl --http2 and Java's HttpClient offer HTTP/2 so. The parser ends such a request after its headers and takes the
    body for another protocol. Its head is therefore read once more without the offer, and the body after it. An offer
    that uvicorn takes, of a websocket, stays one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = OfferParser(self)
        self._head: bytes | None = None  # of a request that is to be read once more

    def on_headers_complete(self) -> None:
        # CONNECT changes the protocol without any offer
        if self.parser.should_upgrade() and not self._should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._head = self._head_without_offer()
        else:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._head is None:
            super().on_message_complete()

    def take_head(self) -> bytes | None:
        """The head to be read before anything else; None where the offer is not to be declined."""
        head, self._head = self._head, None
        return head

    def _head_without_offer(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class Decliner(Protocol):
    """Hears of requests, and says how one that made an offer is to be read."""

    def take_head(self) -> bytes | None: ...


class OfferParser(HttpRequestParser):
    """Goes on after an offer that its protocol declines. Raises HttpParserUpgrade for every other."""

    def __init__(self, protocol: Decliner) -> None:
        self._protocol = protocol
        self._begin()

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        """Requests that follow each other in one piece may all make offers: a loop, and nothing is copied."""
        rest = memoryview(data)
        while True:
            try:
                super().feed_data(rest)
            except HttpParserUpgrade as upgrade:
                head = self._protocol.take_head()
                if head is None:
                    raise
                self._begin()
                super().feed_data(head)
                rest = rest[upgrade.args[0] :]
            else:
                return

    def _begin(self) -> None:
        """Anew, as after a head with `Connection: close` it would take nothing more."""
        super().__init__(self._protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
