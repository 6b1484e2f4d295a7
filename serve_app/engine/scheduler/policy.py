"""The policy: who is served first. The rest of the scheduler asks it and keeps no history of flows.

A policy answers four questions:

1. turns: which line of the queue goes next;
2. prompt tokens: how a step's budget is divided among the prompts of several lines;
3. rows: which of the sequences that decode sit out a step;
4. places: who gives up its place where all are taken, or its blocks where none is free.

`Policy` itself is the plain reference: first come, first served. `FairShares` answers all four from one account of what
each flow was served.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from serve_app.core.shares import Share

RANKS = {"interactive": 0, "standard": 1, "batch": 2}

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
    """The rows of a step that are beyond what all flows have, and the rows of the flow that has the least of all."""

    num_rows: int = 0
    num_least: int = 0


NONE_BEYOND = Beyond()


class Policy:
    """First come, first served; `FairShares` overrides what concerns several flows. Runs in the engine's thread.

    num_swaps: adapters that were loaded so far
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.num_swaps = 0

    @property
    def gap(self) -> float:
        """Between the highest and the lowest counter of the flows that wait; may be read by any thread."""
        return 0.0

    def line_of(self, share: Share) -> Hashable:
        """Return which line of the queue such requests wait in; within a line the first that came is first."""
        return ()

    def enter(self, share: Share) -> None:
        """Note that a line begins to wait."""

    def leave(self, share: Share) -> None:
        """Note that a line waits no more."""

    def begin_turn(self, share: Share) -> None:
        """Note that a sequence of this line begins."""

    def charge(self, share: Share, service: float) -> None:
        """Note service that was computed for a flow."""

    def charge_swaps(self, share: Share, num_swaps: int) -> float:
        """Note adapters that were loaded for a flow; return the service that they count as."""
        service = self.rules.swap_weight * num_swaps
        self.num_swaps += num_swaps
        self.charge(share, service)
        return service

    def holds_turn(self, share: Share) -> bool:
        """Return whether the last turn was of this flow."""
        return False

    def turn_key(self, share: Share, *, owed: float, since: float, is_kept: bool, number: int, now: float) -> Key:
        """Return the key of a line's turn.

        owed:    what the flow will be charged for its running sequences, divided by its weight
        since:   when the line began to wait, or last had a turn; seconds
        is_kept: it holds the turn, or its adapter is loaded
        number:  in which the lines came
        """
        return 0, 0.0, number

    def divide(self, claims: Items[Claim], amount: int) -> list[int]:
        """Return the prompt tokens for each claim, `amount` in all or all that is wanted."""
        return divided(claims, amount, price=0.0, lump=max(amount, 1))

    def rows(self, decoding: Items[Share], allowed: Callable[[int, int], int]) -> tuple[set[int], Beyond]:
        """Return which of the rows sit out a step, and how many of the others are beyond what all flows have.

        allowed: of the rows that all flows have and those beyond, how many of the latter a step may compute
        """
        return set(), NONE_BEYOND

    def victim(self, running: Items[Share]) -> int:
        """Return which of the running, oldest first, is preempted where blocks run out."""
        return len(running) - 1

    def giver(
        self, running: Items[Share], debts: Items[float], claimant: Share, *, resumes: Callable[[int], bool]
    ) -> int | None:
        """Return which of the running, oldest first, gives up its place to a claimant; None where none does.

        debts:   what the flow of each will be charged for it, divided by its weight
        resumes: whether one could go on later with next to nothing computed again
        """
        return None

    def may_take_spare(self, running: Items[Share], debts: Items[float], claimant: Share) -> bool:
        """Return whether a claimant may have one of the spare places."""
        return False

    def note_given(self, flow: str) -> None:
        """Note that a flow gave up a place."""

    def note_recomputed(self, flow: str, num_tokens: int) -> None:
        """Note tokens of a flow that are computed again, as a place was given up and their blocks were not kept."""


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
