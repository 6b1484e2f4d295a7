"""The calls of a router to one replica: they outlive whoever makes them, and what fails is the loss of the replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TypeVar

from serve_app.core.backend import Backend, may_take_long
from serve_app.core.errors import ReplicaLost, ServeError
from serve_app.core.log_context import about
from serve_app.core.request import GenerationRequest
from serve_app.router.patience import begin

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Tell = Callable[[str, Sequence[str]], Awaitable[None]]
"""A call of a backend that names a router and its requests."""


class Calls:
    """Tasks have an empty context and are owned here: the cancellation of a client's request reaches no call half made.

    on_refused: called with requests that the replica did not take, before their `submit` is answered
    is_lost:    set by the owner when the replica is gone; nothing more is submitted then, and what it does not hear is
                no news
    """

    def __init__(
        self, backend: Backend, router_id: str, replica_id: str, *, on_refused: Callable[[Sequence[str]], None]
    ) -> None:
        self.is_lost = False
        self._backend = backend
        self._router_id = router_id
        self._replica_id = replica_id
        self._on_refused = on_refused
        self._submissions: dict[str, asyncio.Task[ServeError | bool]] = {}
        self._taken_late: set[str] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._asking: set[asyncio.Task[object]] = set()
        self._flow = asyncio.Lock()

    def spawn(self, work: Coroutine[object, object, Result]) -> asyncio.Task[Result]:
        return begin(work, self._tasks)

    def give_up(self) -> None:
        """Let nobody wait any longer for the answer to a question; what was submitted is its owner's to move."""
        for asking in self._asking:
            asking.cancel()

    async def finish(self) -> None:
        """Wait for every call that was made."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def submit(self, requests: Sequence[GenerationRequest]) -> asyncio.Task[ServeError | bool]:
        """Give requests to the replica; the task ends as `Backend.submit`, or with the error that refused them all."""
        if may_take_long(requests):
            self._taken_late |= {request.request_id for request in requests}
        task = self.spawn(self._submit(requests))
        self._submissions |= dict.fromkeys((request.request_id for request in requests), task)
        return task

    def abort(self, request_ids: Sequence[str], names: Sequence[str] = ()) -> asyncio.Task[bool]:
        """False where the replica did not hear it: one that is gone has nothing to abort, one that is not aborts when
        the lease ends. Requests whose images are still to be seen or whose texts wait are aborted at once as well, so
        that nothing is done for them.

        names: what clients know the requests by, for the log
        """
        if late := [each for each in request_ids if each in self._taken_late]:
            self.spawn(self._hurry(late))
        return self.spawn(self._tell(self._backend.abort, request_ids, names))

    def tell(self, tell: Tell, request_ids: Sequence[str], names: Sequence[str]) -> asyncio.Task[bool]:
        """Have something said of requests, in the order of these calls. False where the replica did not hear it."""

        async def in_order() -> bool:
            async with self._flow:  # in the order they were spawned in: a pause must not overtake its resumption
                return await self._tell(tell, request_ids, names)

        return self.spawn(in_order())

    async def _submit(self, requests: Sequence[GenerationRequest]) -> ServeError | bool:
        request_ids = [request.request_id for request in requests]
        is_kept = False
        error: ServeError | None = None
        try:
            if self.is_lost:
                error = replica_lost("is gone")
            else:
                is_kept = await self._backend.submit(self._router_id, requests)
        except ServeError as refusal:
            error = refusal
        except Exception as failure:
            extra = about(request.client_request_id for request in requests)
            logger.warning("replica %s could not be given requests: %r", self._replica_id, failure, extra=extra)
            error = replica_lost("could not be reached")
        finally:
            self._taken_late.difference_update(request_ids)
            for request_id in request_ids:
                self._submissions.pop(request_id, None)
        if error is None:
            return is_kept
        self._on_refused(request_ids)
        return error

    async def _hurry(self, request_ids: Sequence[str]) -> None:
        """Abort what was submitted and not answered. Where it overtakes them or is not heard nothing is lost."""
        with suppress(Exception):
            await self._backend.abort(self._router_id, request_ids)

    async def _tell(self, tell: Tell, request_ids: Sequence[str], names: Sequence[str]) -> bool:
        """Say something of requests once their submissions are answered; False where the replica did not hear it."""
        submissions = {self._submissions[i] for i in request_ids if i in self._submissions}
        if submissions:
            await asyncio.wait(submissions)
        try:
            await tell(self._router_id, request_ids)
        except Exception as failure:
            level = logging.DEBUG if self.is_lost else logging.WARNING
            facts = (self._replica_id, len(request_ids), failure)
            logger.log(level, "replica %s could not be told of %d requests: %r", *facts, extra=about(names))
            return False
        return True

    async def ask(self, call: Coroutine[object, object, Result]) -> Result:
        """Make a call that outlives whoever waits for it. Raises ServeError, which is ReplicaLost for all else."""

        async def answer() -> Result | ServeError:
            try:
                return await call
            except ServeError as refusal:
                return refusal
            except Exception as failure:
                logger.warning("replica %s could not be asked: %r", self._replica_id, failure)
                return replica_lost("could not be reached")

        asking = self.spawn(answer())
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait([asking])
        if asking.cancelled():  # it may not have begun
            call.close()
            raise replica_lost("fell silent")
        found = asking.result()
        if isinstance(found, ServeError):
            raise found
        return found


def replica_lost(reason: str) -> ReplicaLost:
    """reason: what became of the replica, as a verb"""
    return ReplicaLost(f"The replica that computed the request {reason}.")
