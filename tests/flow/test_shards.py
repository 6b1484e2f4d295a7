"""Bytes to bytes where a replica's model is divided among processes, and what becomes of it when one is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.core.errors import EngineFailed, ReplicaLost
from serve_app.engine.tensor_parallel.workers import Workers
from serve_app.router.router import RouterConfig
from serve_app.router.run import RunSettings
from tests.engine.harness import core_of
from tests.flow.stack import ROUTER_ID, Stack, running_stack

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

PROMPTS = ["Once upon a time there was a fox", "Once upon a time there was an owl", "The sea"]
MODELS = ["demo", "demo:pirate", "demo:shout", "demo:json"]


def crew_of(stack: Stack) -> Workers:
    found = core_of(stack.services[0]).model.workers
    assert found is not None
    return found


async def answers(stack: Stack) -> list[object]:
    asked = [
        {"model": model, "prompt": PROMPTS, "max_tokens": 16, "n": 2, "temperature": 0.8, "seed": 5, "logprobs": 1}
        for model in MODELS
    ]
    bodies = await asyncio.gather(*(stack.complete(**one) for one in asked))
    return [[(choice["text"], choice["finish_reason"]) for choice in body["choices"]] for body in bodies]


async def test_a_divided_model_answers_as_the_whole_one_does_and_leaves_no_process() -> None:
    async with running_stack(num_replicas=1) as whole:
        expected = await answers(whole)
    async with running_stack(num_replicas=1, tensor_parallel=2) as divided:
        [process_id] = [each.pid for each in crew_of(divided)._processes]
        assert await answers(divided) == expected
        await divided.settled()
        divided.services[0].check()
    assert not is_there(process_id)


@pytest.mark.law("Shards")
async def test_a_replica_that_lost_a_shard_fails_its_health_check_and_its_requests_end() -> None:
    config = RouterConfig(run=RunSettings(max_pause_s=1.0))  # for so long it waits for another replica
    async with running_stack(num_replicas=1, config=config, tensor_parallel=2) as stack:
        [process_id] = [each.pid for each in crew_of(stack)._processes]
        running = asyncio.create_task(
            stack.post({"model": "demo", "prompt": "The sea", "max_tokens": 600, "ignore_eos": True})
        )
        await until(lambda: core_of(stack.services[0]).num_steps > 3)
        os.kill(process_id, signal.SIGKILL)
        assert (await running).status_code == 503
        with pytest.raises(EngineFailed):
            stack.services[0].check()
        for _ in range(3):
            refused = await stack.post({"model": "demo", "prompt": "The sea", "max_tokens": 4})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        with pytest.raises(ReplicaLost):
            await stack.services[0].hello("router-0")


@pytest.mark.law("Shards")
async def test_a_replica_that_lost_a_shard_is_lost_at_once_and_what_it_computed_goes_on_elsewhere() -> None:
    body = {"model": "demo", "prompt": "The sea", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    async with running_stack(num_replicas=1, tensor_parallel=2) as divided, running_stack(num_replicas=1) as whole:
        expected = (await whole.post(body)).json()["choices"]
        other = whole.services[0]
        running = asyncio.create_task(divided.post(body))
        await until(lambda: core_of(divided.services[0]).num_steps > 3)
        divided.fleet.put(replace(await other.hello(ROUTER_ID), replica_id="whole"), other)
        os.kill(crew_of(divided)._processes[0].pid, signal.SIGKILL)
        assert (await running).json()["choices"] == expected
        await until(lambda: [link.replica_id for link in divided.fleet.links_of()] == ["whole"])


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_there(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()
