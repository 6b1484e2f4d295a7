"""Clients that offer HTTP/2 over cleartext, through HAProxy: they are answered in HTTP/1.1, their body read."""

from __future__ import annotations

import json
import socket
import sys
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cluster.faults import TIMEOUT_S

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray has HAProxy for Linux alone"),
]

BODY = json.dumps({"model": "demo", "prompt": "The cat", "max_tokens": 4, "temperature": 0}).encode()


def test_an_offer_of_http2_is_declined_and_its_request_answered(base_url: str) -> None:
    """The bytes are those of `curl --http2`."""
    address = urlsplit(base_url)
    head = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {address.netloc}",
        "User-Agent: curl/8.14.1",
        "Accept: */*",
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA",
        "Content-Type: application/json",
        f"Content-Length: {len(BODY)}",
    ]
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 80), timeout=TIMEOUT_S) as connection:
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + BODY)
        response = _response(connection)
    headers = {"Content-Type": "application/json"}
    plain = httpx.post(f"{base_url}/v1/completions", content=BODY, headers=headers, timeout=TIMEOUT_S)
    assert response["choices"] == plain.json()["choices"]


def _response(connection: socket.socket) -> dict[str, object]:
    """The body of an answer whose length is told; its status must be 200, and no protocol may be switched."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += _more(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0] == "http/1.1 200 ok"
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert "upgrade" not in headers
    while len(body) < int(headers["content-length"]):
        body += _more(connection)
    parsed: dict[str, object] = json.loads(body)
    return parsed


def _more(connection: socket.socket) -> bytes:
    received = connection.recv(65536)
    assert received, "the connection was closed before its answer was whole"
    return received
