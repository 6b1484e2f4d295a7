"""One router's connection to one replica: gives it requests, and brings every delta to its request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing

from serve_app.core.backend import Backend
from serve_app.core.cards import ReplicaCard
from serve_app.core.delta import Frame, Load
from serve_app.core.errors import ServeError
from serve_app.core.ledger import Spent
from serve_app.core.log_context import about
from serve_app.core.prompt import Tokenization, TokenizeRequest
from serve_app.core.request import GenerationRequest
from serve_app.router.calls import Calls, replica_lost
from serve_app.router.placement import Standing
from serve_app.router.registry import Receive, Registry
from serve_app.router.room import Room

logger = logging.getLogger(__name__)


class ReplicaLink:
    """Owns the one stream of frames from a replica, the calls to it, and what it is known to hold.

    on_lost: called when the replica is gone or is left, but not where a retired link closes by itself
    has_ended: whether the replica itself has ended the stream, as it does where it did not hear of the router
    on_spent: called with what each frame says that was spent, before anybody has the frame's deltas
    """

    def __init__(
        self,
        backend: Backend,
        card: ReplicaCard,
        router_id: str,
        *,
        on_lost: Callable[[], None] = lambda: None,
        on_spent: Callable[[Sequence[Spent]], None] = lambda spent: None,
    ) -> None:
        self.card = card
        self._backend = backend
        self._router_id = router_id
        self._on_lost = on_lost
        self._on_spent = on_spent
        self._registry = Registry()
        self._calls = Calls(backend, router_id, card.replica_id, on_refused=self._forget)
        self._reader: asyncio.Task[None] | None = None
        self._load = card.load
        self._num_foreign = 0
        self._is_retired = False
        self.has_ended = False

    def start(self) -> None:
        """Open the stream. Needs a running event loop."""
        self._reader = self._calls.spawn(self._read())

    @property
    def replica_id(self) -> str:
        return self.card.replica_id

    @property
    def is_open(self) -> bool:
        """Whether it takes new requests."""
        return self._reader is not None and not (self._calls.is_lost or self._is_retired)

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
        if card.load.num_steps >= self._load.num_steps:  # a frame may have passed it on the way
            self._load = card.load

    @property
    def standing(self) -> Standing:
        return Standing(work=self.num_outstanding + self._num_foreign, capacity=self._load.num_blocks)

    def submit(self, requests: Sequence[GenerationRequest], receive: Receive) -> asyncio.Task[ServeError | None]:
        """Give requests to the replica; the task ends with None, or with the error that refused them all.

        They are registered and counted before this returns: deltas may come before the answer does.
        Cancelling whoever awaits the task is safe, a later `abort` waits for it.
        """
        self._registry.add(requests, receive)
        return self._calls.submit(requests)

    def abort(self, request_ids: Sequence[str]) -> asyncio.Task[bool]:
        """Dispatch no delta of these requests from now on, and tell the replica in the background."""
        names = self._registry.names_of(request_ids)
        self._forget(request_ids)
        return self._calls.abort(request_ids, names)

    def pause(self, request_ids: Sequence[str]) -> asyncio.Task[bool]:
        """Have the replica compute nothing more of these requests until `resume`; tell it in the background."""
        return self._calls.pause(request_ids, self._registry.names_of(request_ids))

    def resume(self, request_ids: Sequence[str]) -> asyncio.Task[None]:
        """Have the replica go on with what was paused. Where it cannot be told, the requests are lost: they would
        wait for ever."""
        telling = self._calls.resume(request_ids, self._registry.names_of(request_ids))
        return self._calls.spawn(self._resume(telling, request_ids))

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        """Raises ServeError."""
        return await self._calls.tokenize(request)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Raises ServeError."""
        return await self._calls.detokenize(token_ids)

    def retire(self) -> None:
        """Take no new requests, and close once those that run have ended."""
        self._is_retired = True
        self._close_if_idle()

    def readmit(self) -> bool:
        """Take requests again after `retire`; False where the link is closed already."""
        self._is_retired = self._calls.is_lost
        return self.is_open

    async def close(self) -> None:
        """Leave the replica; what still runs there ends with ReplicaLost."""
        self._is_retired = True
        if self._reader is not None:
            self._reader.cancel()
        self._lose("was disconnected by the router")
        await self._calls.finish()

    async def _read(self) -> None:
        reason = "was disconnected by the router"
        try:
            async with aclosing(self._backend.attach(self._router_id)) as frames:
                async for frame in frames:
                    self._receive(frame)
            reason, self.has_ended = "ended its stream", True
        except Exception as error:
            reason = "went away"
            extra = about(self._registry.names_of())
            logger.warning("replica %s went away: %r", self.replica_id, error, extra=extra)
        finally:
            self._lose(reason)

    def _receive(self, frame: Frame) -> None:
        self._on_spent(frame.load.spent)
        for delta in frame.deltas:
            self._registry.dispatch(delta)
        self._load = frame.load
        self._num_foreign = max(0, frame.load.num_running + frame.load.num_waiting - self.num_outstanding)
        self._close_if_idle()

    async def _resume(self, telling: asyncio.Task[bool], request_ids: Sequence[str]) -> None:
        if not await telling:
            self._registry.lose(lambda: replica_lost("could not be told to go on"), request_ids)
            self._close_if_idle()

    def _forget(self, request_ids: Sequence[str]) -> None:
        self._registry.forget(request_ids)
        self._close_if_idle()

    def _lose(self, reason: str) -> None:
        if self._calls.is_lost:
            return
        self._calls.is_lost = True
        lost = self._registry.lose(lambda: replica_lost(reason))
        if lost and self.has_ended:
            self._calls.abort(lost)  # it may have taken them behind the end of its stream
        self._on_lost()

    def _close_if_idle(self) -> None:
        if self._is_retired and not self.num_outstanding and not self._calls.is_lost and self._reader is not None:
            self._calls.is_lost = True
            self._reader.cancel()
