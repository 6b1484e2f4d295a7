"""A replica that is killed in the middle of its work costs streams a pause and plain requests nothing."""

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
    fetched,
    plain,
    signal_a_replica,
    streamed,
)

pytestmark = pytest.mark.cluster

NUM_PLAIN = 12
NUM_STREAMS = 12
NUM_AFTERWARDS = 20


async def test_of_a_killed_replica_plain_requests_and_streams_go_on_where_they_stopped(base_url: str) -> None:
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
    assert [stream.errors for stream in seen] == [[]] * NUM_STREAMS
    assert all(stream.is_done for stream in seen)
    assert [stream.text for stream in seen] == right[NUM_PLAIN:]
    assert told == right[:NUM_PLAIN]
    assert await _num_moved(base_url) > 0, f"the killed replica had some of them ({MAX_TOKENS=})"


async def test_of_a_killed_router_every_stream_is_fetched_whole_at_another(base_url: str) -> None:
    """The one that is killed may be the only one; then its streams go on at the one that comes in its place."""
    numbers = range(NUM_STREAMS)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as client:
        await both_replicas_are_there()
        right = await asyncio.gather(*(plain(client, number) for number in numbers))
        seen = [Streamed() for _ in numbers]
        streams = [asyncio.create_task(fetched(client, number, seen[number])) for number in numbers]
        await everybody_is_running(len(numbers))
        while not all(each.id for each in seen):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.to_thread(signal_a_replica, signal.SIGKILL, "router", "Router")
        await asyncio.gather(*streams)
    assert [stream.errors for stream in seen] == [[]] * NUM_STREAMS
    assert [stream.text for stream in seen] == right
    assert sum(stream.num_fetched for stream in seen) > 0


async def _num_moved(base_url: str) -> float:
    """Prompts that went on at another replica, by the router that was asked."""
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as client:
        text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("serve_app_moved_prompts_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
