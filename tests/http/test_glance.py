"""What is told of a request at a glance is what the protocol would find, and only of plain ones."""

from __future__ import annotations

import pytest

from serve_app.api.dialects import HEADER
from serve_app.http.glance import MAX_BYTES, MAX_HEADERS, plain_post
from tests.http.full_proxy import BODY, CHUNKED, COUNTED, HEALTH, post


@pytest.mark.parametrize("rest", [COUNTED, b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED], ids=["counted", "chunked"])
def test_a_plain_request_is_seen_with_its_headers(rest: bytes) -> None:
    request = plain_post(post(rest))
    assert request is not None
    assert request.headers[0] == (b"host", b"x")
    assert request.request_id == "mine"
    assert not request.is_last


@pytest.mark.parametrize(
    "data",
    [
        post(version=b"1.0"),
        post(b"Connection: close\r\n" + COUNTED),
    ],
    ids=["1.0", "close"],
)
def test_it_is_seen_where_the_connection_ends_with_it(data: bytes) -> None:
    request = plain_post(data)
    assert request is not None
    assert request.is_last


@pytest.mark.parametrize(
    "data",
    [
        HEALTH,
        post(path=b"/v1/models"),
        post(path=b"/v1/completions?x=1"),
        post()[:-1],
        post()[:20],
        b"",
        post() + post(),
        post() + HEALTH,
        post() + b"x",
        post(b"Expect: 100-continue\r\n" + COUNTED),
        post(b"Upgrade: h2c\r\nConnection: upgrade\r\n" + COUNTED),
        post(HEADER.encode() + b": openai\r\n" + COUNTED),
        post(b"Content-Length: x\r\n\r\n"),
        post(b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED),
        post(b"".join(b"X-%d: y\r\n" % number for number in range(MAX_HEADERS)) + COUNTED),
        post(b"Content-Length: %d\r\n\r\n" % MAX_BYTES + bytes(MAX_BYTES)),
        b"\x16\x03\x01" + post(),
    ],
    ids=[
        "looks", "another path", "a query", "a part", "a head's part", "nothing", "two", "with another", "with a rest",
        "expects", "upgrades", "a dialect", "no number", "two lengths", "many headers", "long", "TLS",
    ],
)  # fmt: skip
def test_whatever_else_comes_is_left_to_the_protocol(data: bytes) -> None:
    assert plain_post(data) is None


def test_a_body_is_no_head() -> None:
    assert plain_post(post(b"Content-Length: %d\r\n\r\n" % len(BODY + BODY) + BODY + BODY)) is not None
