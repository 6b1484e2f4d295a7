"""The deployment of one base model: a thin wall around its service."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.core.backend import NOTHING
from serve_app.core.cards import ReplicaCard
from serve_app.core.errors import EngineFailed, ReplicaLost, ServeError
from serve_app.core.log_context import log_context
from serve_app.core.request import GenerationRequest
from serve_app.deployments.autoscaling import Work
from serve_app.deployments.loading import exempt_what_is_loaded, resting
from serve_app.deployments.ray_private import num_cpus_of_ray
from serve_app.deployments.transport import pack

if TYPE_CHECKING:
    from serve_app.replica.service import ModelService

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


async def answer_or_refusal(answer: Awaitable[Answer]) -> Answer | ServeError:
    """Return the answer, or the refusal that came instead.

    Any other exception goes to our own log. Serve's log would contain its message, and with it what a client sent.
    """
    try:
        return await answer
    except ServeError as refusal:
        return refusal
    except Exception as error:
        logger.exception("a call of a router failed")
        return EngineFailed(f"The replica failed ({type(error).__name__}).")


async def _in_a_thread_that_ends(load: Callable[[str], ModelService], replica_id: str) -> ModelService:
    """Load in a thread that ends afterwards.

    Each thread that computes has an OpenMP team for as long as it lives. If those are more threads than CPUs, libgomp
    lets none of them stay awake between parallel regions.
    """
    threads = ThreadPoolExecutor(1, thread_name_prefix="load")
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, load, replica_id)
    finally:
        threads.shutdown(wait=False)


def let_torch_have_cpus() -> None:
    """Have torch, which is imported later, compute in a thread for each CPU where Ray sets aside less than one.

    Ray says one thread there, and as many as it sets aside elsewhere. What an operator says in OMP_NUM_THREADS, Ray and
    we leave, unless it is one: then `threads` has to say it. A GPU's replica computes little on CPUs.
    """
    set_aside = ray.get_runtime_context().get_assigned_resources()
    is_part = not set_aside.get("GPU") and set_aside.get("CPU", 0.0) < 1
    if is_part and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        os.environ["OMP_NUM_THREADS"] = str(int(num_cpus_of_ray()))


def work_of(service: ModelService) -> Work:
    """Return the load of a replica, as the autoscaling policy reads it."""
    card = service.card
    num_blocks = card.load.num_blocks
    return Work(
        sequences=service.num_open / max(1, card.model.max_num_sequences),
        kv_cache=1 - card.load.num_free_blocks / num_blocks if num_blocks else 0.0,
        wait_s=service.wait_s,
    )


class Model:
    """One replica of a base model, as Serve holds it.

    Routers pin their calls, and each call names the replica it is meant for: one that went astray is refused before
    anything has happened. What a client is to be told is returned, not raised: Serve would log every mistake of a
    client as a failure of ours, with a traceback.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self, load: Callable[[str], ModelService]
    ) -> None:
        """load: loads the model for the replica of the given id, and blocks until that is done"""
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        let_torch_have_cpus()
        with resting():
            self._service = await _in_a_thread_that_ends(load, self._replica_id)
        exempt_what_is_loaded()
        self._service.start()
        self._warming = asyncio.create_task(self._warm())
        if context.rank.rank > 0:  # others take requests meanwhile; the first replica's own would only be held up
            await self._warming

    async def hello(self, router_id: str, heard: Mapping[str, int] = NOTHING) -> ReplicaCard:
        """Broadcast by routers to all replicas, so it names none."""
        return await self._service.hello(router_id, heard)

    async def attach(self, replica_id: str, router_id: str) -> AsyncGenerator[bytes, None]:
        """Frames, packed."""
        self._refuse_strays(replica_id)
        async with aclosing(self._service.attach(router_id)) as frames:
            async for frame in frames:
                yield pack(frame)

    async def submit(self, replica_id: str, router_id: str, requests: Sequence[GenerationRequest]) -> bool | ServeError:
        self._refuse_strays(replica_id)
        with log_context(request.client_request_id for request in requests):
            return await answer_or_refusal(self._service.submit(router_id, requests))

    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        """Answer as a method of `Backend` that is neither of those above; a refusal is returned."""
        self._refuse_strays(replica_id)
        return await answer_or_refusal(getattr(self._service, method)(*arguments))

    async def check_health(self) -> None:
        """Called by Serve; three failures in a row and the replica is replaced."""
        self._service.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve where it scales the model: what the policy decides by."""
        return work_of(self._service)._asdict()

    async def __del__(self) -> None:
        """Awaited by Serve once the replica has drained, or after its constructor failed."""
        service: ModelService | None = getattr(self, "_service", None)
        if service is not None:
            await service.close()

    async def _warm(self) -> None:
        try:
            await self._service.warm()
        except Exception:
            logger.exception("what first requests wait for could not be done beforehand")

    def _refuse_strays(self, replica_id: str) -> None:
        if replica_id != self._replica_id:
            raise ReplicaLost(f"The call was meant for replica {replica_id} and arrived at {self._replica_id}.")


class Front:
    """Makes the Model an inner deployment: behind HAProxy Serve refuses a request router of our own at an entrance.

    Nothing is sent through it, routers speak to the Model's replicas themselves.
    """

    def __init__(self, model: DeploymentHandle[Any]) -> None:
        self._model = model

    async def __call__(self) -> None:
        """Serve wants an entrance to be callable; this one has no route."""
