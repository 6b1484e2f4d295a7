"""Keeps those that wait in the order of their turns, without asking each of them for its key again and again."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from serve_app.engine.scheduler.turns import Key

SLACK = 64
"""Entries that are out of date may be as many as lines and so many more, before they are thrown out."""

KeyOf = Callable[[int], Key]
"""Of a line, by its number, at this moment."""


class Order:
    """Lines by number, the least key first.

    The key of a line that nobody has touched only grows: what was written down of it is never too much. So the least
    that is written down is asked for again, and goes back where it has grown; a line is asked about when its turn is
    near, and not whenever something was computed for its flow.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int]] = []
        self._keys: dict[int, Key] = {}
        self._touched: dict[int, None] = {}

    def touch(self, line: int) -> None:
        """Its key may have become less, or it has come."""
        self._keys.pop(line, None)
        self._touched[line] = None

    def remove(self, line: int) -> None:
        self._keys.pop(line, None)
        self._touched.pop(line, None)

    def take_touched(self) -> list[int]:
        """Those that were touched and are nowhere now; the caller brings them back with `put`, or touches them."""
        touched, self._touched = list(self._touched), {}
        return touched

    def put(self, line: int, key: Key) -> None:
        self._keys[line] = key
        heappush(self._heap, (key, line))
        if len(self._heap) > 2 * len(self._keys) + SLACK:
            self._heap = [(key, line) for line, key in self._keys.items()]
            heapify(self._heap)

    def pop_below(self, bound: Key | None, key_of: KeyOf) -> tuple[int, Key] | None:
        """Take out the line with the least key, where that is below the bound; amortised O(log lines)."""
        while self._heap and (bound is None or self._heap[0][0] < bound):
            before, line = heappop(self._heap)
            if self._keys.get(line) != before:
                continue  # touched, removed or written down anew since
            now = key_of(line)
            if now > before:
                self.put(line, now)
            else:
                del self._keys[line]
                return line, now
        return None
