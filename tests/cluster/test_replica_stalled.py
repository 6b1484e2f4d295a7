"""A replica that stands still for longer than a router's lease loses nothing of what it computes."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from tests.cluster.conftest import LEASE_S
from tests.cluster.faults import (
    TIMEOUT_S,
    both_replicas_are_there,
    everybody_is_running,
    plain,
    signal_a_replica,
    streamed,
)

pytestmark = pytest.mark.cluster

NUM_PLAIN = 8
NUM_STREAMS = 8
STALL_S = 2 * LEASE_S


async def test_what_runs_on_a_replica_that_stood_still_is_computed_to_its_end(base_url: str) -> None:
    numbers = range(NUM_PLAIN + NUM_STREAMS)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as client:
        await both_replicas_are_there()
        right = await asyncio.gather(*(plain(client, number) for number in numbers))
        answers = [asyncio.create_task(plain(client, number)) for number in numbers[:NUM_PLAIN]]
        streams = [asyncio.create_task(streamed(client, number)) for number in numbers[NUM_PLAIN:]]
        await everybody_is_running(len(numbers))
        stalled = await asyncio.to_thread(signal_a_replica, signal.SIGSTOP)
        try:
            await asyncio.sleep(STALL_S)
        finally:
            os.kill(stalled, signal.SIGCONT)
        seen = await asyncio.gather(*streams)
        told = await asyncio.gather(*answers, return_exceptions=True)
    assert [(stream.text, stream.errors) for stream in seen] == [(text, []) for text in right[NUM_PLAIN:]]
    assert told == right[:NUM_PLAIN]
