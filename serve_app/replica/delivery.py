"""How deltas leave a replica: an outbox for each router, and a lease that each router renews.

For each step, on the event loop: 1. sort its deltas by router; 2. put them into the routers' outboxes; 3. send what is
in an outbox as one frame whenever its router reads.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace

from serve_app.core.delta import Delta, Frame, Load, PromptReport, TokenLogprob, joined_by_sequence
from serve_app.core.errors import EngineFailed, ServeError
from serve_app.core.ledger import Spent
from serve_app.core.log_context import about
from serve_app.replica.requests import OpenRequests

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""So often a router gets a frame, whatever the engine does. The event loop sends it, which waits for no step."""

# What Python takes for these, about; the text of tokens is shared by all that mention them.
DELTA_BYTES = 200
LOGPROB_BYTES = 150
ID_BYTES = 8


class Leases:
    """Finds routers that fell silent. Call `expired` at least once every `period_s`.

    If `expired` is called late, the process or its event loop was held up and heard no router. That time does not
    count.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self.period_s = lease_s / 4
        self._clock = clock
        self._heard_at: dict[str, float] = {}
        self._looked_at = clock()

    def hear(self, router_id: str) -> None:
        self._heard_at[router_id] = self._clock()

    def expired(self) -> list[str]:
        """Forget and return the routers not heard of for `lease_s`."""
        now = self._clock()
        overslept = max(0.0, now - self._looked_at - self.period_s)
        self._looked_at = now
        self._heard_at = {id_: min(now, heard_at + overslept) for id_, heard_at in self._heard_at.items()}
        silent = [id_ for id_, heard_at in self._heard_at.items() if heard_at < now - self.lease_s]
        for router_id in silent:
            del self._heard_at[router_id]
        return silent


class Outbox:
    """Buffers the deltas for one router, without a timer.

    A reader that keeps up gets a frame per step; a slower one gets fewer, larger frames. If the reader does not read,
    the outbox joins the deltas of each sequence. Its memory then grows with the generated text, not with the steps.

    max_deltas: pending before deltas of the same sequence are joined
    num_bytes:  what is pending takes in memory, about
    """

    def __init__(self, max_deltas: int) -> None:
        self._deltas: list[Delta] = []
        self._load = Load()
        self._spent: dict[str, Spent] = {}
        self._adapters_revision = 0
        self._has_news = asyncio.Event()
        self._is_closed = self._is_due = False
        self._max_deltas = max_deltas
        self._joins_at = max_deltas
        self.num_bytes = 0
        self.has_reader = False

    def put(self, deltas: Items[Delta], load: Load) -> None:
        self._deltas += deltas
        self._load = load
        self._spent.update((each.flow, each) for each in load.spent)
        self.num_bytes += sum(map(size_of, deltas))
        if len(self._deltas) > self._joins_at:
            self._join()
        self._has_news.set()

    def beat(self, load: Load) -> None:
        """Send a frame even if there is nothing to tell but the load."""
        self._load, self._is_due = replace(load, spent=()), True
        self._has_news.set()

    def tell(self, adapters_revision: int) -> None:
        """Send a frame that says which adapters the card has now."""
        self._adapters_revision = adapters_revision
        self._has_news.set()

    def drop(self) -> list[Delta]:
        """Take out and return all pending deltas."""
        deltas, self._deltas = self._deltas, []
        self.num_bytes = 0
        self._joins_at = self._max_deltas
        return deltas

    def close(self) -> None:
        """End the stream once the pending deltas are read."""
        self._is_closed = True
        self._has_news.set()

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Yield frames until closed and empty; to one reader only."""
        self.has_reader = True
        while self._has_any or not self._is_closed:
            if self._has_any:
                revision, self._adapters_revision = self._adapters_revision, 0
                yield Frame(deltas=tuple(self.drop()), load=self._take_load(), adapters_revision=revision)
            else:
                self._has_news.clear()
                await self._has_news.wait()

    @property
    def _has_any(self) -> bool:
        """Return whether there are deltas, news of what flows spent or of adapters, or a heartbeat."""
        return bool(self._deltas or self._spent or self._adapters_revision or self._is_due)

    def _take_load(self) -> Load:
        """Return the last load with all that was spent since the last frame."""
        spent, self._spent, self._is_due = self._spent, {}, False
        is_of_last_step = len(spent) == len(self._load.spent)
        return self._load if is_of_last_step else replace(self._load, spent=tuple(spent.values()))

    def _join(self) -> None:
        """Join the deltas of each sequence. The next time is when as many again have come."""
        self._deltas = joined_by_sequence(self._deltas)
        self.num_bytes = sum(map(size_of, self._deltas))
        self._joins_at = max(self._max_deltas, 2 * len(self._deltas))


class Delivery:
    """Keeps an outbox for each router. A failure for one router ends its stream and its requests alone.

    end:         aborts requests, in `open_requests` and in the engine
    make_outbox: makes the outbox of a new router
    max_outbox_bytes: that a router may leave unread; beyond it every sequence it has here ends with an error
    """

    def __init__(
        self,
        open_requests: OpenRequests,
        *,
        end: Callable[[frozenset[str]], None],
        make_outbox: Callable[[], Outbox],
        max_outbox_bytes: int,
    ) -> None:
        self._open_requests = open_requests
        self._end = end
        self._make_outbox = make_outbox
        self._max_outbox_bytes = max_outbox_bytes
        self._outboxes: dict[str, Outbox] = {}

    def __contains__(self, router_id: str) -> bool:
        """Return whether the router has an outbox."""
        return router_id in self._outboxes

    def expect(self, router_id: str) -> None:
        """Keep deltas for a router from now on, even before it opens its stream."""
        if router_id not in self._outboxes:
            self._outboxes[router_id] = self._make_outbox()

    async def frames(self, router_id: str) -> AsyncGenerator[Frame, None]:
        """Stream frames to a router, and detach it when the stream closes. A second stream ends the first."""
        if router_id in self._outboxes and self._outboxes[router_id].has_reader:
            self.detach(router_id)
        self.expect(router_id)
        outbox = self._outboxes[router_id]
        try:
            async for frame in outbox.frames():
                yield frame
        finally:
            if self._outboxes.get(router_id) is outbox:
                self.detach(router_id)

    def deliver(self, deltas: Items[Delta], load: Load) -> None:
        """Send a step's deltas with the engine's load after it.

        If a step has no deltas but its load tells of spending, as for an aborted request, every router gets the load.
        """
        by_router = self._open_requests.sort(deltas)
        if not by_router and load.spent:
            by_router = {router_id: [] for router_id in self._outboxes}
        for router_id, own in by_router.items():
            try:
                self._send(router_id, own, load)
            except Exception:
                self.give_up(router_id, "could not be sent its deltas; its stream ends")

    def beat(self, load: Load) -> None:
        """Tell every router that the replica is there."""
        for outbox in self._outboxes.values():
            outbox.beat(load)

    def tell(self, adapters_revision: int) -> None:
        """Let every router know at once that the card has other adapters."""
        for outbox in self._outboxes.values():
            outbox.tell(adapters_revision)

    def give_up(self, router_id: str, why: str) -> None:
        """Detach a router and log its requests. Call it in an exception handler, or when a router is gone."""
        extra, failure = about(self._open_requests.names_of(router_id)), sys.exception()
        level = logging.WARNING if failure is None else logging.ERROR
        logger.log(level, "router %s %s", router_id, why, exc_info=failure is not None, extra=extra)
        self.detach(router_id)

    def detach(self, router_id: str) -> None:
        """Close a router's stream and abort its requests."""
        if (outbox := self._outboxes.pop(router_id, None)) is not None:
            outbox.close()
        self._end(self._open_requests.owned_by(router_id))

    def lose(self, request_ids: frozenset[str], error: ServeError, load: Load) -> None:
        """Tell routers that these open requests of theirs have failed."""
        lost = [Delta(request_id=id_, sample=0, error=error) for id_ in sorted(request_ids)]
        for router_id, own in self._open_requests.sort(lost).items():
            if router_id in self._outboxes:
                self._outboxes[router_id].put(own, load)

    def close(self) -> None:
        """End every stream once its outbox is empty."""
        for outbox in self._outboxes.values():
            outbox.close()

    def _send(self, router_id: str, deltas: Items[Delta], load: Load) -> None:
        outbox = self._outboxes[router_id]
        outbox.put(deltas, load)
        if outbox.num_bytes > self._max_outbox_bytes:
            extra, facts = about(self._open_requests.names_of(router_id)), (router_id, outbox.num_bytes)
            logger.error("router %s left %d bytes unread; its requests are ended", *facts, extra=extra)
            self._shed(router_id, outbox, load)

    def _shed(self, router_id: str, outbox: Outbox, load: Load) -> None:
        """Replace all that a router has not read by one error per sequence, and abort its requests."""
        error = EngineFailed(f"The router did not read its results: more than {self._max_outbox_bytes} bytes.")
        mine = self._open_requests.owned_by(router_id)
        lost = self._open_requests.samples_of(mine) | {(delta.request_id, delta.sample) for delta in outbox.drop()}
        self._end(mine)
        outbox.put([Delta(request_id=id_, sample=sample, error=error) for id_, sample in sorted(lost)], load)


def size_of(delta: Delta) -> int:
    """Return the bytes that a delta takes, about."""
    num_bytes = DELTA_BYTES + len(delta.text) + ID_BYTES * len(delta.token_ids) + _size_of_logprobs(delta.logprobs)
    if delta.recording is not None:
        num_bytes += delta.recording.num_bytes
    return num_bytes + (_size_of_report(delta.prompt) if delta.prompt is not None else 0)


def _size_of_report(report: PromptReport) -> int:
    num_bytes = len(report.text or "") + ID_BYTES * len(report.token_ids or ())
    return num_bytes + _size_of_logprobs(report.logprobs or ()) + _size_of_logprobs(report.whole_logprobs or ())


def _size_of_logprobs(logprobs: Iterable[TokenLogprob]) -> int:
    return sum(LOGPROB_BYTES * (1 + len(entry.top)) for entry in logprobs)
