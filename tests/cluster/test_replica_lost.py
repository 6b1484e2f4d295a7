"""A replica that is killed in the middle of its work costs streams their rest and plain requests nothing."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from tests.cluster.faults import (
    MAX_TOKENS,
    TIMEOUT_S,
    Streamed,
    both_replicas_are_there,
    everybody_is_running,
    plain,
    signal_a_replica,
    streamed,
)

pytestmark = pytest.mark.cluster

NUM_PLAIN = 12
NUM_STREAMS = 12
NUM_AFTERWARDS = 20


async def test_of_a_killed_replica_plain_requests_are_answered_and_streams_end_with_an_error(base_url: str) -> None:
    numbers = range(NUM_PLAIN + NUM_STREAMS)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as client:
        await both_replicas_are_there()
        right = await asyncio.gather(*(plain(client, number) for number in numbers))
        answers = [asyncio.create_task(plain(client, number)) for number in numbers[:NUM_PLAIN]]
        streams = [asyncio.create_task(streamed(client, number)) for number in numbers[NUM_PLAIN:]]
        await everybody_is_running(len(numbers))
        await asyncio.to_thread(signal_a_replica, signal.SIGKILL)
        afterwards = await asyncio.gather(*(plain(client, number) for number in range(NUM_AFTERWARDS)))
        seen = await asyncio.gather(*streams)
        told = await asyncio.gather(*answers, return_exceptions=True)
    assert afterwards == right[:NUM_AFTERWARDS]
    _are_whole_or_told(seen, right[NUM_PLAIN:])
    assert told == right[:NUM_PLAIN]


def _are_whole_or_told(seen: list[Streamed], right: list[str]) -> None:
    """No stream ends silently, and none sends what its request has not in its answer."""
    lost = [stream for stream in seen if stream.errors]
    assert 0 < len(lost) < NUM_STREAMS, f"{len(lost)} of {NUM_STREAMS} streams were on the replica ({MAX_TOKENS=})"
    assert all(stream.is_done for stream in seen)
    for stream, text in zip(seen, right, strict=True):
        assert text.startswith(stream.text) if stream.errors else stream.text == text
    assert all("replica_lost" in error.values() for stream in lost for error in stream.errors), lost
