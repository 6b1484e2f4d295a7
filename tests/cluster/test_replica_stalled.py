"""A replica that stands still holds nobody up, and computes nothing for nobody when it is back."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from tests.cluster.faults import (
    TIMEOUT_S,
    both_replicas_are_there,
    everybody_is_running,
    plain,
    running,
    signal_a_replica,
    streamed,
    until,
)

pytestmark = pytest.mark.cluster

NUM_PLAIN = 8
NUM_STREAMS = 8


async def test_what_runs_on_a_replica_that_stands_still_goes_on_at_the_other_one(base_url: str) -> None:
    numbers = range(NUM_PLAIN + NUM_STREAMS)
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S) as client:
        await both_replicas_are_there()
        right = await asyncio.gather(*(plain(client, number) for number in numbers))
        answers = [asyncio.create_task(plain(client, number)) for number in numbers[:NUM_PLAIN]]
        streams = [asyncio.create_task(streamed(client, number)) for number in numbers[NUM_PLAIN:]]
        await everybody_is_running(len(numbers))
        stalled = await asyncio.to_thread(signal_a_replica, signal.SIGSTOP)
        try:
            seen = await asyncio.gather(*streams)
            told = await asyncio.gather(*answers, return_exceptions=True)
            afterwards = await asyncio.gather(*(plain(client, number) for number in numbers))
        finally:
            os.kill(stalled, signal.SIGCONT)
        assert [(stream.text, stream.errors) for stream in seen] == [(text, []) for text in right[NUM_PLAIN:]]
        assert (told, afterwards) == (right[:NUM_PLAIN], right)
        await both_replicas_are_there()
        await asyncio.to_thread(until, running, holds=lambda found: found == [0, 0])
