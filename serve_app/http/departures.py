"""Whose requests left last: the part that each flow has of all that gets done."""

from __future__ import annotations

from collections import Counter, deque

NUM_REMEMBERED = 512
NUM_BELIEVED = 32
"""Departures that what is believed before any weighs as much as."""


class Departures:
    """Of the last so many. What it takes does not grow with how many flows there are."""

    def __init__(self) -> None:
        self._last: deque[str] = deque()
        self._by_flow: Counter[str] = Counter()

    def note(self, flow: str) -> None:
        self._last.append(flow)
        self._by_flow[flow] += 1
        if len(self._last) > NUM_REMEMBERED:
            take_one(self._by_flow, self._last.popleft())

    def part_of(self, flow: str, *, belief: float) -> float:
        """From 0 to 1. belief: what it is taken for as long as few have left"""
        return (self._by_flow[flow] + belief * NUM_BELIEVED) / (len(self._last) + NUM_BELIEVED)


def take_one(counts: Counter[str], flow: str) -> None:
    """None is there with nothing."""
    counts[flow] -= 1
    if not counts[flow]:
        del counts[flow]
