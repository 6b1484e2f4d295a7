"""Brings what the engine's steps gave to the routers that it is for, each by its own outbox; on the event loop."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Items

from serve_app.core.delta import Delta, Frame, Load
from serve_app.core.errors import EngineFailed
from serve_app.core.log_context import about
from serve_app.engine.outbox import Outbox
from serve_app.replica.open_requests import OpenRequests

logger = logging.getLogger(__name__)


class Delivery:
    """Outboxes by router. What fails for one router ends its stream and its requests, and concerns no other.

    end:         ends requests before their time: takes them out of `open_requests` and out of the engine
    make_outbox: for a router that was not heard of before
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
        """Whether the router has an outbox."""
        return router_id in self._outboxes

    def expect(self, router_id: str) -> None:
        """Keep from now on what is for a router, though its stream may still be on the way."""
        if router_id not in self._outboxes:
            self._outboxes[router_id] = self._make_outbox()

    async def frames(self, router_id: str) -> AsyncGenerator[Frame, None]:
        """Stream frames to a router, and detach it when the stream is closed; one that it has already ends."""
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
        """Send a step's deltas. `load` is how busy the engine is after it; what of it nobody would have with a delta of
        its own, as what was spent for whom nobody waits any more, all routers are sent alone."""
        by_router = self._open_requests.sort(deltas)
        if not by_router and load.spent:
            by_router = {router_id: [] for router_id in self._outboxes}
        for router_id, own in by_router.items():
            try:
                self._send(router_id, own, load)
            except Exception:
                self.give_up(router_id, "could not be sent its deltas; its stream ends")

    def give_up(self, router_id: str, why: str) -> None:
        """Detach a router, and name the requests that end by it. To be called where an exception is handled, or a
        router is found to be gone.
        """
        extra, failure = about(self._open_requests.names_of(router_id)), sys.exception()
        level = logging.WARNING if failure is None else logging.ERROR
        logger.log(level, "router %s %s", router_id, why, exc_info=failure is not None, extra=extra)
        self.detach(router_id)

    def detach(self, router_id: str) -> None:
        """Close a router's stream, and end what it has here."""
        if (outbox := self._outboxes.pop(router_id, None)) is not None:
            outbox.close()
        self._end(self._open_requests.owned_by(router_id))

    def close(self) -> None:
        """End every stream once what is in its outbox was read."""
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
        """Put one error per sequence in place of all that a router has not read, and end what it has here."""
        error = EngineFailed(f"The router did not read its results: more than {self._max_outbox_bytes} bytes.")
        mine = self._open_requests.owned_by(router_id)
        lost = self._open_requests.samples_of(mine) | {(delta.request_id, delta.sample) for delta in outbox.drop()}
        self._end(mine)
        outbox.put([Delta(request_id=id_, sample=sample, error=error) for id_, sample in sorted(lost)], load)
