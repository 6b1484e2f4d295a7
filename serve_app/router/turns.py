"""Decides which admitted request the router hands to replicas next, and what part of everything is whose by weight."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

from serve_app.core.errors import ServeError
from serve_app.core.shares import Share

WORK_PER_SLOT = 1.5
"""Sequences handed on per slot of the replicas: half of them on their way leave no slot empty between two requests."""
MIN_AT_WORK = 64
"""The bound for models of few slots."""
MIN_EACH = 6
"""Sequences of each flow that may be handed on, whatever the other flows have."""

MayBegin = Callable[[str, int, int], bool]


class Turns:
    """Lets requests begin as the replicas have use for them; the others wait, each flow's in their order.

    A request at work costs router and replica milliseconds, and slows all others meanwhile. One that waits costs
    nothing. Whenever a request begins to wait or ends, Turns lets others begin:

    1. The flow with the fewest sequences at work for its weight is next.
    2. Its oldest request begins where `may_begin` allows it.

    may_begin: told a flow, and how many sequences are at work here, of all flows and of this one
    used_by:   sequences of a flow that are at work elsewhere
    """

    def __init__(self, may_begin: MayBegin, used_by: Callable[[str], int] = lambda flow: 0) -> None:
        self._may_begin = may_begin
        self._used_by = used_by
        self._at_work: Counter[str] = Counter()  # sequences, by flow
        self._working: dict[Hashable, tuple[str, int]] = {}
        self._waiting: dict[str, dict[Hashable, Waiting]] = {}

    @property
    def num_at_work(self) -> int:
        """Sequences of all flows that are at work."""
        return self._at_work.total()

    def of(self, flow: str) -> int:
        """Return how many sequences of the flow are at work."""
        return self._at_work[flow]

    async def wait(self, request: Hashable, share: Share, size: int = 1) -> None:
        """Wait until the request may begin. Raises what `fail` is given."""
        waiting = Waiting(share.weight, size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(share.flow, {})[request] = waiting
        self.begin()
        await waiting.begins

    def fail(self, request: Hashable, error: ServeError) -> None:
        """End the request's wait, if it waits."""
        for line in self._waiting.values():
            if request in line and not line[request].begins.done():
                line[request].begins.set_exception(error)

    def leave(self, request: Hashable, flow: str) -> None:
        """Let others begin: the request is over, or waits no more."""
        if request in self._working:
            _, size = self._working.pop(request)
            self._at_work[flow] -= size
            if not self._at_work[flow]:
                del self._at_work[flow]
        elif request in self._waiting.get(flow, ()):
            self._take_out(request, flow)
        self.begin()

    def begin(self) -> None:
        """Begin every request that may begin by now."""
        while (flow := self._next()) is not None:
            request = next(iter(self._waiting[flow]))
            waiting = self._take_out(request, flow)
            self._working[request] = flow, waiting.size
            self._at_work[flow] += waiting.size
            if not waiting.begins.done():
                waiting.begins.set_result(None)

    def _next(self) -> str | None:
        """Return the flow whose turn it is; None where nobody waits who may begin."""
        total = self.num_at_work
        allowed = [flow for flow in self._waiting if self._may_begin(flow, total, self._at_work[flow])]
        return min(allowed, key=self._use_of, default=None)

    def _use_of(self, flow: str) -> float:
        first = next(iter(self._waiting[flow].values()))
        return (self._at_work[flow] + self._used_by(flow)) / first.weight

    def _take_out(self, request: Hashable, flow: str) -> Waiting:
        found = self._waiting[flow].pop(request)
        if not self._waiting[flow]:
            del self._waiting[flow]
        return found


class Waiting(NamedTuple):
    """A request that waits."""

    weight: float
    size: int
    begins: asyncio.Future[None]


def is_room(num_slots: int, *, part: float, total: int, own: int) -> bool:
    """Return whether one more request of a flow may begin, beside so many sequences of all flows and of its own.

    Together they fill the replicas' slots and half as many again. A flow below its part of that, or below `MIN_EACH`,
    begins up to twice the bound: a replica knows better whose turn it is than who comes first here.
    """
    bound = max(MIN_AT_WORK, math.ceil(WORK_PER_SLOT * num_slots))
    return total < bound or (own < max(MIN_EACH, bound * part) and total < 2 * bound)


LATELY_S = 60.0
"""Whoever asked within it is kept room for; who comes after longer is kept room for from then on."""


class Active:
    """clock: seconds, monotonic"""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._flows: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._weight = 0.0

    def __len__(self) -> int:
        return len(self._flows)

    def note(self, share: Share) -> None:
        """One of the flow's requests has come, whatever becomes of it."""
        self._forget(share.flow)
        self._flows[share.flow] = self._clock(), share.weight
        self._weight += share.weight
        while self._clock() - next(iter(self._flows.values()))[0] > LATELY_S:
            self._forget(next(iter(self._flows)))

    def part_of(self, flow: str) -> float:
        """From 0 to 1; 1 of who is alone, and of who was not heard of."""
        known = self._flows.get(flow)
        return 1.0 if known is None or len(self._flows) == 1 else known[1] / self._weight

    def _forget(self, flow: str) -> None:
        known = self._flows.pop(flow, None)
        if known is not None:
            self._weight -= known[1]
