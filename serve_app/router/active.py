"""Who has asked for something lately, and what part of everything is whose by weight."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from serve_app.core.shares import Share

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
