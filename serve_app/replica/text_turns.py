"""Whose texts are cut into tokens next: of the flow that was given least, its shortest, now and then its oldest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from serve_app.core.shares import Share

OLDEST_EVERY = 4
"""So often it is a flow's oldest work and not its shortest, so that nothing waits for ever."""


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """The texts of one call.

    size: what it is counted as, characters
    """

    share: Share
    size: int
    do: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Unless nobody waits for it any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            found = self.do()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(found)


class Line:
    """What waits of one flow."""

    def __init__(self) -> None:
        self._waiting: dict[int, Work] = {}
        self._by_size: list[tuple[int, int]] = []
        self._num_added = self._num_taken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Work) -> None:
        self._num_added += 1
        self._waiting[self._num_added] = work
        heappush(self._by_size, (work.size, self._num_added))

    def take(self) -> Work:
        """The shortest, of equal ones the first that came; only where there is one."""
        self._num_taken += 1
        if self._num_taken % OLDEST_EVERY == 0:
            return self._waiting.pop(next(iter(self._waiting)))
        while True:
            _, number = heappop(self._by_size)
            if number in self._waiting:
                return self._waiting.pop(number)

    def discard(self, work: Work) -> None:
        self._waiting = {number: each for number, each in self._waiting.items() if each is not work}


class TextTurns:
    """Flows get as much as each other where all want more, counted in characters divided by their weights.

    A flow that wanted nothing is owed nothing: it begins where those are that wait. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._given: dict[str, float] = {}
        self._level = 0.0

    def add(self, work: Work) -> None:
        flow = work.share.flow
        if flow not in self._lines:
            self._lines[flow] = Line()
            self._given[flow] = max(self._given.get(flow, 0.0), self._level)
        self._lines[flow].add(work)

    def take(self) -> Work | None:
        """What is done next; None where nothing waits."""
        if not self._lines:
            return None
        flow = min(self._lines, key=self._given.__getitem__)
        work = self._lines[flow].take()
        self._level = self._given[flow]
        self._given[flow] += work.size / work.share.weight
        self._forget()
        return work

    def discard(self, work: Work) -> None:
        """Take out what nobody waits for any more, if it is in it."""
        if (line := self._lines.get(work.share.flow)) is not None:
            line.discard(work)
            self._forget()

    def take_all(self) -> list[Work]:
        found = []
        while (work := self.take()) is not None:
            found.append(work)
        return found

    def _forget(self) -> None:
        """Lines that are empty, and what was given to flows beyond what others have had since."""
        self._lines = {flow: line for flow, line in self._lines.items() if line}
        if not self._lines:
            self._given, self._level = {}, 0.0
        self._given = {flow: each for flow, each in self._given.items() if flow in self._lines or each > self._level}
