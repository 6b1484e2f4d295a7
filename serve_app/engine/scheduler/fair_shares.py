"""Fair shares: virtual token counters (Sheng et al., OSDI 2024) answer all that a policy is asked.

A flow's counter is the service that it was charged for, divided by its weight. The idea is always the same: whoever has
the lowest counter, with what its running sequences will still be charged for, is served first.

1. turns: the line with the lowest counter is next; class comes before counter, and age before class;
2. prompt tokens: lumps go to the lowest counter, which each lump raises;
3. rows: rows beyond those that all flows have are handed out in the same way, one by one, and take turns;
4. places: the flow with the highest counter gives one, within a budget that its own service refills.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from heapq import nlargest

from serve_app.core.shares import Share
from serve_app.engine.scheduler.policy import NONE_BEYOND, RANKS, Beyond, Claim, Key, Policy, Rules, divided

MAX_KNOWN = 4096
"""Flows whose counters are kept; of those that ask for nothing the least served are forgotten beyond."""
MAX_GIVERS = 1024
"""Flows whose budgets of places are kept; the others may give as many at once as at first."""
AT_ONCE = 8
"""Places that a flow may give one after the other if it gave none for as many quanta: many may come at once."""
PAID = 4
"""What was lost with a place is computed again; so many times as much is computed before its flow gives another."""
LEAST_LUMP, MOST_LUMPS = 16, 4
"""A step's prompt tokens are divided in lumps of so many, or into so many lumps. A step cut into crumbs costs more, and
prompts that are computed side by side all begin to decode late."""
ROUNDING = 1e-9


class FairShares(Policy):
    """Charged at every step for what was computed. Belongs to the engine's thread, but for `gap`.

    A flow that begins to wait is lifted to a quantum below the lowest counter of those that wait. If none waits, it is
    lifted to a quantum below the highest counter that stopped waiting. So a flow does not make up for what it did not
    ask for, but for a quantum: a flow that asks now and then does not wait for the turn of one that asks all the time.
    What a flow was served beyond its share stays.

    Law: for each place that a flow gives but for AT_ONCE of them a quantum is computed for it, and PAID times what it
    had to compute again. So that is a bounded part of what is computed, whoever comes and whatever they ask.

    holder: the flow that had the last turn
    """

    def __init__(self, rules: Rules | None = None) -> None:
        super().__init__(rules)
        self.holder: str | None = None
        self._counters: dict[str, float] = {}
        self._num_lines = Counter[str]()
        self._level = 0.0  # the highest counter of a flow that stopped waiting
        self._budgets: dict[str, float] = {}  # service that a flow may still give up places for; others have the most
        self._rotation: dict[str, int] = {}  # which of a flow's rows is the first to be computed next

    @property
    def gap(self) -> float:
        waiting = [self.counter_of(flow) for flow in list(self._num_lines)]
        return max(waiting) - min(waiting) if waiting else 0.0

    def counter_of(self, flow: str) -> float:
        return self._counters.get(flow, 0.0)

    def line_of(self, share: Share) -> Hashable:
        return share.flow, share.priority

    def enter(self, share: Share) -> None:
        if share.flow not in self._num_lines:
            self._counters[share.flow] = max(self.counter_of(share.flow), self._floor)
        self._num_lines[share.flow] += 1

    def leave(self, share: Share) -> None:
        self._num_lines[share.flow] -= 1
        if not self._num_lines[share.flow]:
            del self._num_lines[share.flow]
            self._level = max(self._level, self._counters[share.flow])
        if len(self._counters) > MAX_KNOWN:
            self._forget()

    def begin_turn(self, share: Share) -> None:
        self.holder = share.flow

    def charge(self, share: Share, service: float) -> None:
        self._counters[share.flow] = self.counter_of(share.flow) + service / share.weight
        if share.flow in self._budgets:
            self._budgets[share.flow] += service
            if self._budgets[share.flow] >= self._most_given:
                del self._budgets[share.flow]

    def holds_turn(self, share: Share) -> bool:
        return share.flow == self.holder

    def turn_key(self, share: Share, *, owed: float, since: float, is_kept: bool, number: int, now: float) -> Key:
        """Class, virtual counter, order of coming; age raises the class, and in the end beats everything."""
        rules, waited_s = self.rules, now - since
        if waited_s > rules.max_wait_s:
            return -1, since, number
        rank = max(0, RANKS[share.priority] - int(waited_s / rules.age_s))
        counter = self._counters.get(share.flow, 0.0) + owed
        return rank, counter - rules.quantum if is_kept else counter, number

    def divide(self, claims: Items[Claim], amount: int) -> list[int]:
        return divided(claims, amount, price=self.rules.prefill_weight, lump=max(LEAST_LUMP, amount // MOST_LUMPS))

    def rows(self, decoding: Items[Share], allowed: Callable[[int, int], int]) -> tuple[set[int], Beyond]:
        """Nobody's rows sit out for a flow that has as many for its weight, or that waits for more: that one has its
        turns. What is beyond the level may stretch a step as far as `allowed` says.
        """
        places = defaultdict[str, list[int]](list)
        for place, share in enumerate(decoding):
            places[share.flow].append(place)
        levels, num_least = self._levels(decoding, places) if len(places) > 1 else ({}, 0)
        num_level = sum(levels.values())
        num_beyond = len(decoding) - num_level if levels else 0
        num_allowed = allowed(num_level, num_beyond) if num_beyond else 0
        if num_allowed >= num_beyond:
            self._rotation.clear()
            return set(), Beyond(num_beyond, num_least) if num_beyond else NONE_BEYOND
        weights = {flow: decoding[own[0]].weight for flow, own in places.items()}
        flows = sorted(places, key=lambda flow: -weights[flow])  # of a tie the heavier first, who rises by less
        claims = [
            Claim((0, levels[flow] / weights[flow], number), weights[flow], len(places[flow]) - levels[flow])
            for number, flow in enumerate(flows)
        ]
        for flow, more in zip(flows, divided(claims, num_allowed, price=1.0, lump=1), strict=True):
            levels[flow] += more
        return self._sitting_out(places, levels), Beyond(num_allowed, num_least)

    def victim(self, running: Items[Share]) -> int:
        """Return the youngest sequence of the lowest class, among the flows with the highest counters.

        A flow counts among them if it is less than a quantum below the highest. The youngest loses least.
        """
        lowest = max(RANKS[share.priority] for share in running)
        counters = [self.counter_of(each.flow) if RANKS[each.priority] == lowest else -math.inf for each in running]
        least = max(counters) - self.rules.quantum
        return max(place for place, counter in enumerate(counters) if counter >= least)

    def giver(
        self, running: Items[Share], debts: Items[float], claimant: Share, *, resumes: Callable[[int], bool]
    ) -> int | None:
        """The youngest of its flow. A place is given by a flow of a lower class, or by one that would be a quantum
        further above its share without it and has more places for its weight than the claimant would have then.
        """
        served = self._served(running, debts)
        num_places = Counter(share.flow for share in running)
        least = served(claimant) + self.rules.quantum
        wanted = (num_places[claimant.flow] + 1) / claimant.weight

        def may_give(share: Share, debt: float) -> bool:
            if self._budgets.get(share.flow, self._most_given) < self.rules.quantum or share.flow == claimant.flow:
                return False
            is_above = share.priority == claimant.priority and served(share) - debt > least
            return _is_lower(share, claimant) or (is_above and wanted <= num_places[share.flow] / share.weight)

        found = [
            (RANKS[share.priority], self.counter_of(share.flow), place)
            for place, (share, debt) in enumerate(zip(running, debts, strict=True))
            if may_give(share, debt) and resumes(place)
        ]
        return max(found)[2] if found else None

    def may_take_spare(self, running: Items[Share], debts: Items[float], claimant: Share) -> bool:
        """Return whether all places are held by others, and one of those flows should have less.

        That is a flow of a lower class, or one that was served more and has more places for its weight than the
        claimant would have.
        """
        num_places = Counter(share.flow for share in running)
        wanted = (num_places[claimant.flow] + 1) / claimant.weight
        served = self._served(running, debts)
        return any(
            _is_lower(share, claimant)
            or (
                share.priority == claimant.priority
                and served(share) > served(claimant)
                and num_places[share.flow] / share.weight >= wanted
            )
            for share in set(running)
            if share.flow != claimant.flow
        )

    def note_given(self, flow: str) -> None:
        self._pay(flow, self.rules.quantum)

    def note_recomputed(self, flow: str, num_tokens: int) -> None:
        self._pay(flow, PAID * self.rules.prefill_weight * num_tokens)

    @property
    def _floor(self) -> float:
        """What a flow that begins to wait is lifted to."""
        return min(map(self.counter_of, self._num_lines), default=self._level) - self.rules.quantum

    @property
    def _most_given(self) -> float:
        return AT_ONCE * self.rules.quantum

    def _pay(self, flow: str, service: float) -> None:
        """Take so much from what a flow may give places for; its service refills it."""
        budget = self._budgets.pop(flow, self._most_given) - service
        if len(self._budgets) >= MAX_GIVERS:
            self._budgets = dict(list(self._budgets.items())[-MAX_GIVERS // 2 :])
        self._budgets[flow] = budget

    def _served(self, running: Items[Share], debts: Items[float]) -> Callable[[Share], float]:
        """Return what gives a flow's counter with its debts."""
        owed = defaultdict[str, float](float)
        for share, debt in zip(running, debts, strict=True):
            owed[share.flow] += debt
        return lambda share: self.counter_of(share.flow) + owed[share.flow]

    def _levels(self, decoding: Items[Share], places: dict[str, list[int]]) -> tuple[dict[str, int], int]:
        """Return how many rows of each flow are within the common level, and the rows of the flow that sets it.

        The level is that of the flow with the fewest rows for its weight, among those of its class or a higher one that
        do not wait.
        """
        ranks = {flow: min(RANKS[decoding[place].priority] for place in own) for flow, own in places.items()}
        heights = {flow: len(own) / decoding[own[0]].weight for flow, own in places.items()}
        levels, level, num_least = dict[str, int](), math.inf, 0
        for flow in sorted(places, key=lambda flow: (ranks[flow], heights[flow])):
            num_rows = len(places[flow])
            if heights[flow] < level and flow not in self._num_lines:
                level, num_least = heights[flow], num_rows
            is_above = level < heights[flow]
            own_level = math.ceil(level * decoding[places[flow][0]].weight - ROUNDING) if is_above else num_rows
            levels[flow] = max(1, own_level)
        return levels, num_least

    def _sitting_out(self, places: dict[str, list[int]], num_given: dict[str, int]) -> set[int]:
        """Return the rows whose turn it is not; each flow's go round."""
        out, rotation = set[int](), dict[str, int]()
        for flow, own in places.items():
            if num_given[flow] < len(own):
                first = self._rotation.get(flow, 0) % len(own)
                rotation[flow] = first + num_given[flow]
                out.update(own[at % len(own)] for at in range(rotation[flow], first + len(own)))
        self._rotation = rotation
        return out

    def _forget(self) -> None:
        """Forget flows that would be lifted anyway, and if need be the least served of the others; none that waits."""
        floor = self._floor
        idle = {f: value for f, value in self._counters.items() if f not in self._num_lines and value > floor}
        kept = nlargest(MAX_KNOWN // 2, idle, key=idle.__getitem__)
        self._counters = {flow: self._counters[flow] for flow in (*self._num_lines, *kept)}


def _is_lower(share: Share, claimant: Share) -> bool:
    return RANKS[share.priority] > RANKS[claimant.priority]
