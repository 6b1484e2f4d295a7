"""Refusals as bytes of HTTP/1.1, each written once for all who are told the same."""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from serve_app.api.dialects import Dialect
from serve_app.core.errors import ServeError
from serve_app.http.refusals import error_response

ServerHeaders = list[tuple[bytes, bytes]]
"""A server's own, its name and the date: another list once they have changed."""


class WrittenRefusals:
    """What `error_response` would answer, ready to be sent.

    error_after: makes the error of a Retry-After, of which there are few, as there are dialects
    """

    def __init__(self, error_after: Callable[[int], ServeError]) -> None:
        self._error_after = error_after
        self._written: dict[tuple[str, int], tuple[bytes, bytes]] = {}
        self._server_headers: ServerHeaders = []
        self._server_lines = b""

    def response(
        self, dialect: Dialect, retry_after_s: int, *, server_headers: ServerHeaders, request_id: str, is_last: bool
    ) -> bytes:
        """The whole response. is_last: whether the connection is closed behind it"""
        if server_headers is not self._server_headers:
            self._server_headers, self._server_lines = server_headers, _lines(server_headers)
        key = (dialect.name, retry_after_s)
        if key not in self._written:
            self._written[key] = _write(self._error_after(retry_after_s), dialect)
        head, body = self._written[key]
        end = b"connection: close\r\n\r\n" if is_last else b"\r\n"
        return b"%bx-request-id: %b\r\n%b%b%b" % (head, request_id.encode(), self._server_lines, end, body)


def _write(error: ServeError, dialect: Dialect) -> tuple[bytes, bytes]:
    """The first lines of the head, and the body."""
    response = error_response(error, dialect)
    return STATUS_LINE[response.status_code] + _lines(response.raw_headers), bytes(response.body)


def _lines(headers: ServerHeaders) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)
