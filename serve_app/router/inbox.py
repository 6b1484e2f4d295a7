"""What a run has for its reader: deltas with their places in the response, and the queue in which they wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.delta import Delta
from serve_app.core.errors import ServeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A delta with its place in the response.

    index: of the choice, part times `n` plus sample
    part:  of the client's request, model index times prompts plus prompt index
    completion_tokens: of the choice so far, this delta included
    """

    index: int
    part: int
    delta: Delta
    completion_tokens: int = 0


Arrival = Event | ServeError


class Inbox:
    """A queue of one reader.

    max_pending: of entries that wait; None is no bound
    is_full:     whether the sender was asked to pause and not yet to go on
    on_full:     called when more wait;  on_slack: called when half of the bound is free again, and only after it

    The bound refuses nothing: what is on its way while the sender is asked to pause still has its place.
    """

    def __init__(self, max_pending: int | None, *, on_full: Callable[[], None], on_slack: Callable[[], None]) -> None:
        self._max_pending = max_pending
        self._on_full = on_full
        self._on_slack = on_slack
        self._entries: deque[Arrival] = deque()
        self._arrived: asyncio.Future[None] | None = None  # of a reader that waits
        self.is_full = False

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Arrival) -> None:
        self._entries.append(entry)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if self._max_pending is not None and len(self._entries) > self._max_pending and not self.is_full:
            self.is_full = True
            self._on_full()

    async def take(self) -> Arrival:
        """The oldest entry. A reader that is cancelled while it waits has taken nothing."""
        while not self._entries:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        entry = self._entries.popleft()
        if self.is_full and self._max_pending is not None and 2 * len(self._entries) <= self._max_pending:
            self.is_full = False
            self._on_slack()
        return entry
