"""Calls over Ray reach the replica they name, or fail."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.core.delta import Finish
from serve_app.core.errors import ReplicaLost
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Prompt
from serve_app.core.request import GenerationRequest, StopParams
from serve_app.deployments.transport import RayBackend
from tests.cluster.faults import TIMEOUT_S

pytestmark = pytest.mark.cluster


@pytest.fixture
def model(base_url: str) -> DeploymentHandle[Any]:
    return serve.get_deployment_handle("Model", "demo")


async def replica_ids(model: DeploymentHandle[Any]) -> list[str]:
    cards = await model.broadcast("hello", "test").results_async(timeout_s=TIMEOUT_S)
    return [card.replica_id for card in cards]


def request(request_id: str) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        model=ModelRef(base="demo"),
        prompt=Prompt(parts=("Once upon a time",)),
        stop=StopParams(max_tokens=4),
    )


async def test_many_calls_at_once_each_reach_the_replica_they_name(model: DeploymentHandle[Any]) -> None:
    ids = await replica_ids(model)
    assert len(ids) == 2
    backends = {replica_id: RayBackend(model, replica_id) for replica_id in ids}

    async def reached(replica_id: str) -> str:
        return (await backends[replica_id].hello("test")).replica_id

    wanted = ids * 40
    assert await asyncio.gather(*map(reached, wanted)) == wanted


async def test_a_replica_that_does_not_exist_is_lost_at_once(model: DeploymentHandle[Any]) -> None:
    backend = RayBackend(model, "nobody")
    async with asyncio.timeout(TIMEOUT_S):  # and does not wait for another one to come
        with pytest.raises(ReplicaLost):
            await backend.hello("test")
        with pytest.raises(ReplicaLost):
            await anext(backend.attach("test"))


async def test_deltas_of_what_was_submitted_come_through_the_stream(model: DeploymentHandle[Any]) -> None:
    backend = RayBackend(model, (await replica_ids(model))[0])

    async def finish_of_the_first() -> Finish:
        async with aclosing(backend.attach("test")) as frames:
            async for frame in frames:
                for delta in frame.deltas:
                    if delta.finish is not None:
                        return delta.finish
        raise AssertionError("the stream ended before the request did")

    async with asyncio.timeout(TIMEOUT_S):
        reading = asyncio.create_task(finish_of_the_first())
        await backend.submit("test", [request("one")])  # what comes before the stream does is kept for it
        finish = await reading
    assert 0 < finish.num_tokens <= 4
