"""One router's connection to one replica: submits, aborts, and brings every delta to its request."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import TypeVar

from serve_app.core.backend import Backend
from serve_app.core.cards import ReplicaCard
from serve_app.core.delta import Frame, Load
from serve_app.core.errors import ReplicaLost, ServeError
from serve_app.core.request import GenerationRequest
from serve_app.core.tokenization import Tokenization, TokenizeRequest
from serve_app.router.placement import Standing
from serve_app.router.registry import Receive, Registry
from serve_app.router.room import Room

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Tell = Callable[[str, Sequence[str]], Awaitable[None]]
"""A call of a backend that names a router and its requests."""


class ReplicaLink:
    """Owns the one stream of frames from a replica.

    Everything that speaks to the replica runs in tasks with an empty context, owned by the link: the
    cancellation of a client's request reaches neither the stream nor a call half made.
    """

    def __init__(
        self,
        backend: Backend,
        card: ReplicaCard,
        router_id: str,
        *,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.card = card
        self._backend = backend
        self._router_id = router_id
        self._on_lost = on_lost
        self._registry = Registry()
        self._submissions: dict[str, asyncio.Task[ServeError | None]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._load = card.load
        self._num_foreign = 0
        self._flow = asyncio.Lock()
        self._is_lost = False
        self._is_retired = False

    def start(self) -> None:
        """Open the stream. Needs a running event loop."""
        self._reader = self._spawn(self._read())

    @property
    def replica_id(self) -> str:
        return self.card.replica_id

    @property
    def is_open(self) -> bool:
        """Whether it takes new requests."""
        return self._reader is not None and not (self._is_lost or self._is_retired)

    @property
    def num_outstanding(self) -> int:
        """Sequences submitted here that have not ended."""
        return self._registry.num_outstanding

    @property
    def room(self) -> Room | None:
        """What the replica can hold, None where it does not say. A sequence that runs has a block at the least."""
        model, num_blocks = self.card.model, self._load.num_blocks
        if not model.max_num_sequences:
            return None
        num_slots = min(model.max_num_sequences, num_blocks or model.max_num_sequences)
        return Room(num_slots=num_slots, num_places=num_slots + model.max_waiting, num_foreign=self._num_foreign)

    @property
    def load(self) -> Load:
        """As last heard of."""
        return self._load

    def refresh(self, card: ReplicaCard) -> None:
        """Take over what the replica says of itself now."""
        self.card = card
        self._load = card.load

    @property
    def standing(self) -> Standing:
        return Standing(work=self.num_outstanding + self._num_foreign, capacity=self._load.num_blocks)

    def submit(self, requests: Sequence[GenerationRequest], receive: Receive) -> asyncio.Task[ServeError | None]:
        """Give requests to the replica; the task ends with None, or with the error that refused them all.

        They are registered and counted before this returns: deltas may come before the answer does.
        Cancelling whoever awaits the task is safe, a later `abort` waits for it.
        """
        task = self._spawn(self._submit(requests))
        self._registry.add(requests, receive)
        self._submissions |= dict.fromkeys((request.request_id for request in requests), task)
        return task

    def abort(self, request_ids: Sequence[str]) -> asyncio.Task[None]:
        """Dispatch no delta of these requests from now on, and tell the replica in the background."""
        self._forget(request_ids)
        return self._spawn(self._abort(request_ids))

    def pause(self, request_ids: Sequence[str]) -> asyncio.Task[bool]:
        """Have the replica compute nothing more of these requests until `resume`; tell it in the background."""
        return self._spawn(self._tell_in_order(self._backend.pause, request_ids))

    def resume(self, request_ids: Sequence[str]) -> asyncio.Task[None]:
        """Have the replica go on with what was paused. Where it cannot be told, the requests are lost: they would
        wait for ever."""
        return self._spawn(self._resume(request_ids))

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        """Raises ServeError."""
        return await self._ask(self._backend.tokenize(request))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Raises ServeError."""
        return await self._ask(self._backend.detokenize(token_ids))

    def retire(self) -> None:
        """Take no new requests, and close once those that run have ended."""
        self._is_retired = True
        self._close_if_idle()

    def readmit(self) -> bool:
        """Take requests again after `retire`; False where the link is closed already."""
        self._is_retired = self._is_lost
        return self.is_open

    async def close(self) -> None:
        """Leave the replica; what still runs there ends with ReplicaLost."""
        self._is_retired = True
        if self._reader is not None:
            self._reader.cancel()
        self._lose("was disconnected by the router")
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _read(self) -> None:
        reason = "was disconnected by the router"
        try:
            async with aclosing(self._backend.attach(self._router_id)) as frames:
                async for frame in frames:
                    self._receive(frame)
            reason = "ended its stream"
        except Exception as error:
            reason = "went away"
            logger.warning("replica %s went away: %r", self.replica_id, error)
        finally:
            self._lose(reason)

    def _receive(self, frame: Frame) -> None:
        for delta in frame.deltas:
            self._registry.dispatch(delta)
        self._load = frame.load
        self._num_foreign = max(0, frame.load.num_running + frame.load.num_waiting - self.num_outstanding)
        self._close_if_idle()

    async def _submit(self, requests: Sequence[GenerationRequest]) -> ServeError | None:
        request_ids = [request.request_id for request in requests]
        error: ServeError | None = None
        try:
            if self._is_lost:
                error = self._lost("is gone")
            else:
                await self._backend.submit(self._router_id, requests)
        except ServeError as refusal:
            error = refusal
        except Exception as failure:
            logger.warning("replica %s could not be given requests: %r", self.replica_id, failure)
            error = self._lost("could not be reached")
        finally:
            for request_id in request_ids:
                self._submissions.pop(request_id, None)
        if error is not None:
            self._forget(request_ids)
        return error

    async def _abort(self, request_ids: Sequence[str]) -> None:
        # A replica that is gone has nothing to abort; one that is not aborts when the lease ends.
        await self._tell(self._backend.abort, request_ids)

    async def _resume(self, request_ids: Sequence[str]) -> None:
        if not await self._tell_in_order(self._backend.resume, request_ids):
            self._registry.lose(lambda: self._lost("could not be told to go on"), request_ids)
            self._close_if_idle()

    async def _tell_in_order(self, tell: Tell, request_ids: Sequence[str]) -> bool:
        """One after the other, in the order they were spawned in: a pause must not overtake its resumption."""
        async with self._flow:
            return await self._tell(tell, request_ids)

    async def _tell(self, tell: Tell, request_ids: Sequence[str]) -> bool:
        """Say something of requests once their submissions are answered; False where the replica did not hear it."""
        submissions = {self._submissions[i] for i in request_ids if i in self._submissions}
        if submissions:
            await asyncio.wait(submissions)
        try:
            await tell(self._router_id, request_ids)
        except Exception as failure:
            level = logging.DEBUG if self._is_lost else logging.WARNING
            logger.log(level, "replica %s could not be told of requests: %r", self.replica_id, failure)
            return False
        return True

    async def _ask(self, call: Coroutine[object, object, Result]) -> Result:
        """Make a call that outlives whoever waits for it; what is not a ServeError becomes ReplicaLost."""

        async def answer() -> Result | ServeError:
            try:
                return await call
            except ServeError as refusal:
                return refusal
            except Exception as failure:
                logger.warning("replica %s could not be asked: %r", self.replica_id, failure)
                return self._lost("could not be reached")

        found = await asyncio.shield(self._spawn(answer()))
        if isinstance(found, ServeError):
            raise found
        return found

    def _forget(self, request_ids: Sequence[str]) -> None:
        self._registry.forget(request_ids)
        self._close_if_idle()

    def _lose(self, reason: str) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._registry.lose(lambda: self._lost(reason))
        self._on_lost()

    def _lost(self, reason: str) -> ReplicaLost:
        return ReplicaLost(f"The replica that computed the request {reason}.")

    def _close_if_idle(self) -> None:
        if self._is_retired and not self.num_outstanding and not self._is_lost and self._reader is not None:
            self._is_lost = True
            self._reader.cancel()

    def _spawn(self, work: Coroutine[object, object, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
