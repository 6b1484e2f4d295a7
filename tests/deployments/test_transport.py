"""What Ray reports becomes what the service says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from serve_app.core.errors import ContextOverflow, EngineFailed, Overloaded, ReplicaLost
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Conversation, Image, Prompt
from serve_app.core.request import GenerationRequest
from serve_app.deployments.transport import RayBackend, as_serve_error

IMAGE = Image(data=b"", name="images[0]")
TEXT = GenerationRequest(request_id="a", model=ModelRef(base="demo"), prompt=Prompt(parts=("Once",)))
PICTURED = replace(TEXT, prompt=Prompt(parts=("Once", IMAGE)))
CHAT = replace(TEXT, conversation=Conversation(source="{}"))


class SlowHandle:
    """Of a deployment that answers after some turns of the event loop, and knows whether it was called off."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def options(self, **changes: Any) -> SlowHandle:
        return self

    def remote(self, *arguments: object) -> SlowHandle:
        return self

    def cancel(self) -> None:
        self.is_cancelled = True

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.parametrize("request_", [TEXT, CHAT], ids=["text", "chat"])
async def test_a_replica_that_does_not_take_a_text_in_time_counts_as_lost(request_: GenerationRequest) -> None:
    handle: Any = SlowHandle()
    with pytest.raises(ReplicaLost):
        await RayBackend(handle, "a", timeout_s=0).submit("router-0", [request_])
    assert handle.is_cancelled


@pytest.mark.parametrize(
    "request_", [PICTURED, replace(CHAT, conversation=Conversation(source="{}", images=(IMAGE,)))], ids=["text", "chat"]
)
async def test_images_are_waited_for_until_they_are_seen(request_: GenerationRequest) -> None:
    handle: Any = SlowHandle()
    await RayBackend(handle, "a", timeout_s=0).submit("router-0", [TEXT, request_])
    assert not handle.is_cancelled


@pytest.mark.parametrize(
    "requests",
    [
        [replace(TEXT, prompt=Prompt(parts=("x" * 40_000,)))],
        [replace(TEXT, prompt=Prompt(parts=((1,) * 40_000,)))],
        [replace(TEXT, prompt=Prompt(parts=("x" * 1000,)))] * 40,
        [replace(CHAT, conversation=Conversation(source="x" * 40_000))],
    ],
    ids=["text", "ids", "many", "chat"],
)
async def test_long_texts_are_waited_for_until_they_are_cut(requests: list[GenerationRequest]) -> None:
    handle: Any = SlowHandle()
    await RayBackend(handle, "a", timeout_s=0).submit("router-0", requests)
    assert not handle.is_cancelled


def raised_in_a_replica(cause: Exception) -> Exception:
    error: Exception = RayTaskError("submit", "Traceback", cause, ip="127.0.0.1").as_instanceof_cause()
    return error


def test_an_error_of_the_service_comes_back_as_itself_with_its_facts() -> None:
    refusal = ContextOverflow("too long", "prompt", {"n_ctx": 64})
    error = as_serve_error(raised_in_a_replica(refusal), "a")
    assert type(error) is ContextOverflow
    assert (error.message, error.param, error.facts) == ("too long", "prompt", {"n_ctx": 64})


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        (ActorDiedError(), ReplicaLost),
        (ActorUnavailableError("cannot be reached", None), ReplicaLost),
        (BackPressureError(num_queued_requests=9, max_queued_requests=8), Overloaded),
        (raised_in_a_replica(ValueError("a mistake of ours")), EngineFailed),
    ],
)
def test_each_failure_of_ray_has_one_meaning(reported: Exception, expected: type[Exception]) -> None:
    assert type(as_serve_error(reported, "a")) is expected


def test_an_overload_says_when_to_come_back() -> None:
    error = as_serve_error(BackPressureError(num_queued_requests=9, max_queued_requests=8), "a")
    assert error.retry_after_s is not None


def test_a_deployment_that_is_away_is_a_lost_replica() -> None:
    from ray.serve._private.common import DeploymentID

    error = as_serve_error(DeploymentUnavailableError(DeploymentID("Model", "demo")), "a")
    assert type(error) is ReplicaLost
