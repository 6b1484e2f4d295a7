"""Headers that an error brings with it, and how a client is seen to leave."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.api.dialects import UNION
from serve_app.core.errors import (
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    ServeError,
    Unauthenticated,
)
from serve_app.http.exchange import ClientGone, Exchange, Message, headers_of, read_body, watched


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (InvalidRequest("Bad."), []),
        (Unauthenticated("No key."), [(b"www-authenticate", b"Bearer")]),
        (Overloaded("Full.", None, {"retry_after_s": 0.2}), [(b"retry-after", b"1")]),
        (Overloaded("Full.", None, {"retry_after_s": 4.1}), [(b"retry-after", b"5")]),
        (PayloadTooLarge("Large."), [(b"connection", b"close")]),
    ],
)
def test_an_error_says_in_headers_what_is_to_be_done(error: ServeError, headers: list[tuple[bytes, bytes]]) -> None:
    assert headers_of(error) == headers


async def test_a_server_that_fails_to_say_more_of_a_client_means_that_it_left() -> None:
    async def receive() -> Message:
        raise RuntimeError("the call was cancelled")

    async def send(message: Message) -> None:
        raise AssertionError(f"sent to nobody: {message}")

    with pytest.raises(ExceptionGroup) as found:
        await watched(asyncio.Event().wait(), receive, Exchange(send, UNION))
    assert found.group_contains(ClientGone)


async def test_a_body_that_does_not_arrive_is_not_waited_for_for_ever() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("never")

    with pytest.raises(RequestTimeout, match=r"0\.01 s"):
        await read_body(receive, content_length="50", max_bytes=100, timeout_s=0.01)
