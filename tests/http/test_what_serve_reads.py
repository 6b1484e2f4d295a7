"""Headers that Serve reads for itself reach it as it can read them, and an id as every line of the log has it."""

from __future__ import annotations

import pytest

from serve_app.http.turnstile import Turnstile
from tests.http.full_proxy import COUNTED, Echo, Line, post


@pytest.mark.parametrize("path", [b"/v1/completions", b"/health"])
@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ([b"mine.1"], [b"mine.1"]),
        ([b"weird id"], []),
        ([b"\xfc"], []),
        ([b"a" * 129], []),
        ([b"mine", b"weird id", b"other"], [b"mine"]),
        ([b"weird id", b"mine"], []),
        ([], []),
    ],
)
async def test_the_application_sees_no_id_that_it_would_not_take_over(
    path: bytes, sent: list[bytes], seen: list[bytes]
) -> None:
    app = Echo()
    ids = b"".join(b"X-Request-Id: " + each + b"\r\n" for each in sent)
    await Line(Turnstile(), app).send_all(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\n" + ids + COUNTED)
    assert app.ids == [seen]


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        (b"serve_multiplexed_model_id", b"\xfc", b"?"),
        (b"Serve-Multiplexed-Model-Id", b"a\xfc", b"?"),
        (b"X-Session-Id", b"\xfc", b"?"),
        (b"X-Session-Id", "ü".encode(), "ü".encode()),
        (b"X-Other", b"\xfc", b"\xfc"),
    ],
)
async def test_what_serve_takes_for_utf8_is_that(name: bytes, value: bytes, seen: bytes) -> None:
    app = Echo()
    rest = name + b": " + value + b"\r\n" + COUNTED
    await Line(Turnstile(), app).send_all(post(rest))
    assert app.headers[0][name.lower()] == seen
