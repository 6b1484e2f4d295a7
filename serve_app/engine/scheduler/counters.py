"""Virtual token counters: what each flow was served, divided by its weight (Sheng et al., OSDI 2024)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace, nlargest

from serve_app.core.shares import Share
from serve_app.engine.scheduler.accounting import Account, Accounts
from serve_app.engine.scheduler.order import SLACK
from serve_app.engine.scheduler.turns import RANKS, Rules

MAX_KNOWN = 4096
"""Flows whose counters are kept; of those that ask for nothing the least served are forgotten beyond."""


class Counters:
    """Charged at the step for what was computed. Belongs to the engine's thread, but for `gap`.

    A flow that begins to wait is lifted to a quantum below the least of those that wait, or where nobody does below the
    highest that stopped waiting: what it did not ask for meanwhile is not made up for, but for a quantum, so that who
    asks now and then does not wait for the turn of who asks all the time. What it was served beyond its share stays.

    holder:      the flow that had the last turn
    num_changes: turns that were given and adapters that were charged; between steps nothing else changes an order
    accounts:    where all that is charged is noted, too
    """

    def __init__(self, rules: Rules | None = None, accounts: Accounts | None = None) -> None:
        self.rules = rules or Rules()
        self.accounts = accounts or Accounts()
        self.holder: str | None = None
        self.num_changes = 0
        self._counters: dict[str, float] = {}
        self._num_lines: Counter[str] = Counter()
        self._least: list[tuple[float, str]] = []
        self._level = 0.0

    @property
    def floor(self) -> float:
        """A quantum above what a flow that begins to wait is lifted to.

        Amortised O(log flows), as counters of those that wait grow.
        """
        while self._least:
            written, flow = self._least[0]
            now = self._counters[flow] if flow in self._num_lines else None
            if now == written:
                return now
            if now is None:
                heappop(self._least)
            else:
                heapreplace(self._least, (now, flow))
        return self._level

    @property
    def gap(self) -> float:
        """Between the highest and the lowest counter of those that wait; may be read by any thread."""
        waiting = [self.of(flow) for flow in list(self._num_lines)]
        return max(waiting) - min(waiting) if waiting else 0.0

    def of(self, flow: str) -> float:
        return self._counters.get(flow, 0.0)

    def waits(self, flow: str) -> bool:
        """Whether requests of it have not begun."""
        return flow in self._num_lines

    def enter(self, flow: str) -> None:
        """A line of the flow's requests begins to wait."""
        if flow not in self._num_lines:
            self._counters[flow] = max(self.of(flow), self.floor - self.rules.quantum)
            heappush(self._least, (self._counters[flow], flow))
        self._num_lines[flow] += 1
        if len(self._least) > 2 * len(self._num_lines) + SLACK:
            self._least = [(self._counters[flow], flow) for flow in self._num_lines]
            heapify(self._least)

    def leave(self, flow: str) -> None:
        """A line of them waits no more."""
        self._num_lines[flow] -= 1
        if not self._num_lines[flow]:
            del self._num_lines[flow]
            self._level = max(self._level, self._counters[flow])
        if len(self._counters) > MAX_KNOWN:
            self._forget()

    def begin_turn(self, flow: str) -> None:
        """One of the flow's requests is to be computed."""
        self.holder = flow
        self.num_changes += 1

    def charge(self, share: Share, service: float, *, num_swaps: int = 0) -> None:
        """service: in the units of the rules, that of the swaps included"""
        self.num_changes += 1
        self.raise_by(share.flow, service / share.weight)
        self.accounts.note(share.flow, Account(service=service, num_swaps=num_swaps))

    def raise_by(self, flow: str, virtual: float) -> None:
        """virtual: service that is noted elsewhere, divided by the weight"""
        self._counters[flow] = self._counters.get(flow, 0.0) + virtual

    def furthest_above(self, running: Sequence[Share]) -> int:
        """Which of those that run, oldest first, gives way where there is not room for all.

        The youngest of the lowest class among the flows that are further above their share than any other, or less
        than a quantum below that: who is younger loses less.
        """
        lowest = max(RANKS[share.priority] for share in running)
        counters = [self.of(each.flow) if RANKS[each.priority] == lowest else float("-inf") for each in running]
        least = max(counters) - self.rules.quantum
        return max(place for place, counter in enumerate(counters) if counter >= least)

    def _forget(self) -> None:
        """Those that would be lifted anyway, and if need be the least served of the others; none that waits."""
        floor = self.floor - self.rules.quantum
        idle = {f: value for f, value in self._counters.items() if f not in self._num_lines and value > floor}
        kept = nlargest(MAX_KNOWN // 2, idle, key=idle.__getitem__)
        self._counters = {flow: self._counters[flow] for flow in (*self._num_lines, *kept)}
