"""The policy: who is served first. The rest of the scheduler asks it and keeps no history of flows.

It answers four questions:

1. turns: which line of the queue goes next;
2. prompt tokens: how a step's budget is divided among the prompts of several lines;
3. rows: which of the sequences that decode sit out a step;
4. places: who gives up its place where all are taken, or its blocks where none is free.

It keeps one virtual counter per flow (Sheng et al., OSDI 2024): the service that it was charged for, divided by its
weight. To each question it answers: whoever has the lowest counter, with what its running sequences will still be
charged for, is served first. With one flow that is first come, first served.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace, nlargest
from typing import NamedTuple

from serve_app.core.shares import Priority, Share

RANKS: dict[Priority, int] = {"interactive": 0, "standard": 1, "batch": 2}

Key = tuple[int, float, int]
"""Class, virtual counter, order of coming; the least is next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What service is worth, and how far order may bend. In units of service; a token of a prompt is usually one.

    prefill_weight: of a position that is computed without anything being drawn after it
    decode_weight:  of a token that is drawn
    swap_weight:    of an adapter that is loaded into a slot
    quantum:        so much more than the others a flow may get before its turn ends, so that what is warm is used
    age_s:          a line that has waited so long counts as of the next higher class, after as long again as of the
                    highest
    max_wait_s:     a line that has had no turn for so long is next, whatever else there is
    """

    prefill_weight: float = 1.0
    decode_weight: float = 2.0
    swap_weight: float = 256.0
    quantum: float = 256.0
    age_s: float = 5.0
    max_wait_s: float = 30.0


class Claim(NamedTuple):
    """Prompt tokens, or rows, that one line could use in a step."""

    key: Key
    weight: float
    wanted: int


class Beyond(NamedTuple):
    """Rows of a step that a flow has above the common level, and rows of the flow that sets this level.

    The level is the rows per weight of the worst-off flow that does not wait. Rows above it may be left out of a step.
    """

    num_rows: int = 0
    num_least: int = 0


NONE_BEYOND = Beyond()


def divided(claims: Items[Claim], amount: int, *, price: float, lump: int) -> list[int]:
    """Return how much each claim is given: a lump at a time to the least key, whose counter that raises.

    price: service that one of `amount` is charged as

    What is given comes to `amount`, or to all that is wanted.
    """
    given = [0] * len(claims)
    heap = [(claim.key, at) for at, claim in enumerate(claims) if claim.wanted]
    heapify(heap)
    while heap and amount:
        (rank, counter, number), at = heap[0]
        claim = claims[at]
        more = min(lump, claim.wanted - given[at], amount)
        given[at] += more
        amount -= more
        if given[at] < claim.wanted:
            heapreplace(heap, ((rank, counter + more * price / claim.weight, number), at))
        else:
            heappop(heap)
    return given


MAX_KNOWN = 4096
"""Flows whose counters are kept, and whose rows' turns; of those that ask for nothing the least served go."""
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


class FairShares:
    """Shares the engine by virtual counters, charged at every step for what was computed. Runs in the engine's thread.

    A flow that begins to wait is lifted to a quantum below the lowest counter of those that wait. If none waits, it is
    lifted to a quantum below the highest counter that stopped waiting. So a flow does not make up for what it did not
    ask for, but for a quantum: a flow that asks now and then does not wait for the turn of one that asks all the time.
    What a flow was served beyond its share stays.

    Law: for each place that a flow gives but for AT_ONCE of them a quantum is computed for it, and PAID times what it
    had to compute again. So that is a bounded part of what is computed, whoever comes and whatever they ask.

    num_swaps: adapters that were loaded so far
    holder:    the flow that had the last turn
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.num_swaps = 0
        self.holder: str | None = None
        self._counters: dict[str, float] = {}
        self._num_lines = Counter[str]()
        self._level = 0.0  # the highest counter of a flow that stopped waiting
        self._budgets: dict[str, float] = {}  # service that a flow may still give up places for; others have the most
        self._rotation: dict[str, int] = {}  # which of a flow's rows is the first to be computed next

    @property
    def gap(self) -> float:
        """Return the difference of the highest and the lowest counter of waiting flows; may be read by any thread."""
        waiting = [self.counter_of(flow) for flow in list(self._num_lines)]
        return max(waiting) - min(waiting) if waiting else 0.0

    def counter_of(self, flow: str) -> float:
        return self._counters.get(flow, 0.0)

    def line_of(self, share: Share) -> Hashable:
        """Return which line of the queue such requests wait in; within a line the first that came is first."""
        return share.flow, share.priority

    def enter(self, share: Share) -> None:
        """Note that a line begins to wait."""
        if share.flow not in self._num_lines:
            self._counters[share.flow] = max(self.counter_of(share.flow), self._floor)
        self._num_lines[share.flow] += 1

    def leave(self, share: Share) -> None:
        """Note that a line waits no more."""
        self._num_lines[share.flow] -= 1
        if not self._num_lines[share.flow]:
            del self._num_lines[share.flow]
            self._level = max(self._level, self._counters[share.flow])
        if len(self._counters) > MAX_KNOWN:
            self._forget()

    def begin_turn(self, share: Share) -> None:
        """Note that a sequence of this line begins."""
        self.holder = share.flow

    def charge(self, share: Share, service: float) -> None:
        """Note service that was computed for a flow."""
        self._counters[share.flow] = self.counter_of(share.flow) + service / share.weight
        if share.flow in self._budgets:
            self._budgets[share.flow] += service
            if self._budgets[share.flow] >= self._most_given:
                del self._budgets[share.flow]

    def charge_swaps(self, share: Share, num_swaps: int) -> float:
        """Note adapters that were loaded for a flow; return the service that they count as."""
        service = self.rules.swap_weight * num_swaps
        self.num_swaps += num_swaps
        self.charge(share, service)
        return service

    def turn_key(self, share: Share, *, owed: float, since: float, is_kept: bool, number: int, now: float) -> Key:
        """Return the key of a line's turn. Age raises the class, and in the end beats everything.

        owed:    what the flow will be charged for its running sequences, divided by its weight
        since:   when the line began to wait, or last had a turn; seconds
        is_kept: it holds the turn, or its adapter is loaded
        number:  in which the lines came
        """
        rules, waited_s = self.rules, now - since
        if waited_s > rules.max_wait_s:
            return -1, since, number
        rank = max(0, RANKS[share.priority] - int(waited_s / rules.age_s))
        counter = self._counters.get(share.flow, 0.0) + owed
        return rank, counter - rules.quantum if is_kept else counter, number

    def divide(self, claims: Items[Claim], amount: int) -> list[int]:
        """Return the prompt tokens for each claim, `amount` in all or all that is wanted."""
        return divided(claims, amount, price=self.rules.prefill_weight, lump=max(LEAST_LUMP, amount // MOST_LUMPS))

    def rows(self, decoding: Items[Share], allowed: Callable[[int, int], int]) -> tuple[set[int], Beyond]:
        """Return which of the rows sit out a step, and how many of the others are beyond what all flows have.

        None sits out for a flow that has as many for its weight, or that waits for more and has its turns.

        allowed: of the rows that all flows have and those beyond, how many of the latter a step may compute
        """
        places = defaultdict[str, list[int]](list)
        for place, share in enumerate(decoding):
            places[share.flow].append(place)
        levels, num_least = self._levels(decoding, places) if len(places) > 1 else ({}, 0)
        num_level = sum(levels.values())
        num_beyond = len(decoding) - num_level if levels else 0
        num_allowed = allowed(num_level, num_beyond) if num_beyond else 0
        if num_allowed >= num_beyond:
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
        """Return which of the running, oldest first, is preempted where blocks run out.

        It is the youngest sequence of the lowest class, among the flows with the highest counters.
        A flow counts among them if it is less than a quantum below the highest. The youngest loses least.
        """
        lowest = max(RANKS[share.priority] for share in running)
        counters = [self.counter_of(each.flow) if RANKS[each.priority] == lowest else -math.inf for each in running]
        least = max(counters) - self.rules.quantum
        return max(place for place, counter in enumerate(counters) if counter >= least)

    def giver(
        self, running: Items[Share], debts: Items[float], claimant: Share, *, resumes: Callable[[int], bool]
    ) -> int | None:
        """Return which of the running, oldest first, gives up its place to a claimant; None where none does.

        It is the youngest of a flow that should have less, and would be a quantum above the claimant without it.

        debts:   what the flow of each will be charged for it, divided by its weight
        resumes: whether one could go on later with next to nothing computed again
        """
        quantum, owed = self.rules.quantum, defaultdict[str, float](float)
        for share, debt in zip(running, debts, strict=True):
            owed[share.flow] += debt
        should_have_less = self._judged_by(running, owed, claimant, by=quantum)
        found = [
            (RANKS[share.priority], self.counter_of(share.flow), place)
            for place, (share, debt) in enumerate(zip(running, debts, strict=True))
            if should_have_less(share, debt) and self._budgets.get(share.flow, self._most_given) >= quantum
            if resumes(place)
        ]
        return max(found)[2] if found else None

    def may_take_spare(self, running: Items[Share], owed: Mapping[str, float], claimant: Share) -> bool:
        """Return whether a claimant may have one of the spare places.  owed: by flow, as for `turn_key`"""
        should_have_less = self._judged_by(running, owed, claimant, by=0.0)
        return any(should_have_less(share, 0.0) for share in running)

    def note_given(self, flow: str) -> None:
        """Note that a flow gave up a place."""
        self._pay(flow, self.rules.quantum)

    def note_recomputed(self, flow: str, num_tokens: int) -> None:
        """Note tokens of a flow that are computed again, as a place was given up and their blocks were not kept."""
        self._pay(flow, PAID * self.rules.prefill_weight * num_tokens)

    @property
    def _floor(self) -> float:
        """Return what a flow that begins to wait is lifted to."""
        return min(map(self._counters.__getitem__, self._num_lines), default=self._level) - self.rules.quantum

    @property
    def _most_given(self) -> float:
        return AT_ONCE * self.rules.quantum

    def _pay(self, flow: str, service: float) -> None:
        """Take so much from what a flow may give places for; its service refills it."""
        budget = self._budgets.pop(flow, self._most_given) - service
        if len(self._budgets) >= MAX_GIVERS:
            self._budgets = dict(list(self._budgets.items())[-MAX_GIVERS // 2 :])
        self._budgets[flow] = budget

    def _judged_by(
        self, running: Items[Share], owed: Mapping[str, float], claimant: Share, *, by: float
    ) -> Callable[[Share, float], bool]:
        """Return what says whether the flow of a running sequence should have less, so that the claimant has more.

        That is one of a lower class, the claimant's own flow among them. Or its flow was served more, by more than `by`
        without the sequence's own debt, and has at least as many places for its weight as the claimant would have.
        """
        num_places = Counter(share.flow for share in running)
        rank, wanted = RANKS[claimant.priority], (num_places[claimant.flow] + 1) / claimant.weight
        served = {flow: self.counter_of(flow) + owed.get(flow, 0.0) for flow in (claimant.flow, *num_places)}

        def should_have_less(share: Share, debt: float) -> bool:
            if RANKS[share.priority] != rank:
                return RANKS[share.priority] > rank
            if share.flow == claimant.flow:
                return False
            is_above = served[share.flow] - debt > served[claimant.flow] + by
            return is_above and num_places[share.flow] / share.weight >= wanted

        return should_have_less

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
        """Return the rows whose turn it is not; each flow's go round, also where it was left out of steps meanwhile."""
        out = set[int]()
        for flow, own in places.items():
            if num_given[flow] < len(own):
                first = self._rotation.pop(flow, 0) % len(own)  # those noted last are last
                self._rotation[flow] = first + num_given[flow]
                out.update(own[at % len(own)] for at in range(self._rotation[flow], first + len(own)))
        while len(self._rotation) > MAX_KNOWN:
            del self._rotation[next(iter(self._rotation))]
        return out

    def _forget(self) -> None:
        """Forget flows that would be lifted anyway, and if need be the least served of the others; none that waits."""
        floor = self._floor
        idle = {f: value for f, value in self._counters.items() if f not in self._num_lines and value > floor}
        kept = nlargest(MAX_KNOWN // 2, idle, key=idle.__getitem__)
        self._counters = {flow: self._counters[flow] for flow in (*self._num_lines, *kept)}
