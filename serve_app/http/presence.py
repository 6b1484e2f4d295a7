"""Which flows are in a proxy or were lately: the part that each has of all that gets done, and its share of it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from serve_app.http.flows import Flows

NUM_REMEMBERED = 512
LATELY_S = 30.0
"""No more of those that left are remembered, and none for longer: as long as anybody is told to stay away."""
NUM_BELIEVED = 32
"""Departures that what is believed before any weighs as much as."""


class Presence:
    """Whoever comes with hundreds at once where others have just left meets them again before its own are done: what
    is foreseen for it goes by all who were there lately, not by those alone who are there now.

    What anything takes does not grow with how many flows there are.
    """

    def __init__(self, flows: Flows, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.inside: Counter[str] = Counter()  # by flow, as are the next three; none is there with nothing
        self._flows = flows
        self._clock = clock
        self._left: deque[tuple[float, str]] = deque()
        self._num_left: Counter[str] = Counter()
        self._num_there: Counter[str] = Counter()
        self._weights: dict[str, float] = {}  # of those that are there or were lately, as last heard of
        self._weight = 0.0

    def enter(self, flow: str) -> None:
        self.inside[flow] += 1
        self._num_there[flow] += 1
        weight = self._flows.weight_of(flow)
        self._weight += weight - self._weights.get(flow, 0.0)
        self._weights[flow] = weight

    def leave(self, flow: str) -> None:
        take_one(self.inside, flow)
        self._left.append((self._clock(), flow))
        self._num_left[flow] += 1
        self._forget()

    def part_of(self, flow: str, *, belief: float) -> float:
        """Of all that left lately, from 0 to 1. belief: what it is taken for as long as few have left"""
        self._forget()
        return (self._num_left[flow] + belief * NUM_BELIEVED) / (len(self._left) + NUM_BELIEVED)

    def share_of(self, flow: str) -> float:
        """By weight, beside those who are there or were lately and one who may come."""
        self._forget()
        own = self._flows.weight_of(flow)
        return own / (own + 1 + self._weight - self._weights.get(flow, 0.0))

    def _forget(self) -> None:
        since = self._clock() - LATELY_S
        while self._left and (len(self._left) > NUM_REMEMBERED or self._left[0][0] < since):
            _, flow = self._left.popleft()
            take_one(self._num_left, flow)
            take_one(self._num_there, flow)
            if flow not in self._num_there:
                self._weight -= self._weights.pop(flow)
        if not self._weights:
            self._weight = 0.0  # what sums of many numbers were rounded by is gone


def take_one(counts: Counter[str], flow: str) -> None:
    """None is there with nothing."""
    counts[flow] -= 1
    if not counts[flow]:
        del counts[flow]
