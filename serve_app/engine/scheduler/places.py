"""Whether somebody who runs gives its place to whose turn it is, where no place is free."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from serve_app.core.shares import Share
from serve_app.engine.scheduler.counters import Counters
from serve_app.engine.scheduler.turns import RANKS

MAX_KNOWN = 1024
"""Flows of which it is known when they gave places; those beyond have all that they may give at once again."""
AT_ONCE = 8
"""Places that a flow gives one after the other, if it gave none for as many quanta: many may come at once."""
PAID = 4
"""What was lost with a place is computed again; so many times as much is computed before its flow gives another."""


class Places:
    """A place is given by a flow of a lower class, or by one that would be a quantum further above its share without it
    and has more places for its weight than the other would have then.

    Law: for each place that a flow gives but for AT_ONCE of them a quantum is computed for it, and PAID times what it
    had to compute again. So that is a bounded part of what is computed, whoever comes and whatever they ask.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._paid_at: dict[str, float] = {}  # what each flow's service is when all that it gave is paid for
        self.num_given = 0

    def giver(
        self, running: Sequence[Share], debts: Sequence[float], claimant: Share, *, resumes: Callable[[int], bool]
    ) -> int | None:
        """Which of those that run, oldest first, gives its place up: the youngest of its flow; None where nobody does.

        debts:   of each, what its flow will be charged for it, as counters count
        resumes: whether one would go on where it was, with next to nothing computed again
        """
        served = self._served(running, debts)
        num_places = Counter(share.flow for share in running)
        least = served(claimant.flow) + self._counters.rules.quantum
        wanted = (num_places[claimant.flow] + 1) / claimant.weight
        found = [
            (RANKS[share.priority], self._counters.of(share.flow), place)
            for place, (share, debt) in enumerate(zip(running, debts, strict=True))
            if share.flow != claimant.flow
            and self._may_give(share, claimant, is_above=served(share.flow) - debt > least)
            and (_is_lower(share, claimant) or wanted <= num_places[share.flow] / share.weight)
            and resumes(place)
        ]
        return max(found)[2] if found else None

    def is_behind(self, running: Sequence[Share], debts: Sequence[float], claimant: Share) -> bool:
        """Whether all places are taken by others: one of a lower class, or one that was served more and has more places
        for its weight than the claimant would have with one of those that are spare."""
        num_places = Counter(share.flow for share in running)
        wanted = (num_places[claimant.flow] + 1) / claimant.weight
        served = self._served(running, debts)
        others = {(share.flow, share.priority): share for share in running if share.flow != claimant.flow}
        return any(
            _is_lower(share, claimant)
            or (
                share.priority == claimant.priority
                and served(share.flow) > served(claimant.flow)
                and num_places[share.flow] / share.weight >= wanted
            )
            for share in others.values()
        )

    def note_given(self, flow: str) -> None:
        """A place of this flow was given."""
        self.num_given += 1
        self._owes(flow, self._counters.rules.quantum)

    def note_lost(self, flow: str, num_tokens: int) -> None:
        """So many tokens of this flow are computed again: what it gave a place for was not kept."""
        self._owes(flow, PAID * self._counters.rules.prefill_weight * num_tokens)

    def _owes(self, flow: str, service: float) -> None:
        """The flow has to have so much more before it gives as many places at once again."""
        if len(self._paid_at) >= MAX_KNOWN:
            kept = {each: at for each, at in self._paid_at.items() if self._had_since(each) < self._most}
            self._paid_at = dict(list(kept.items())[-MAX_KNOWN // 2 :]) if len(kept) >= MAX_KNOWN else kept
        paid_at = self._counters.accounts.service_of(flow) - self._had_since(flow) + service
        self._paid_at.pop(flow, None)  # behind those that owed something before
        self._paid_at[flow] = paid_at

    def _served(self, running: Sequence[Share], debts: Sequence[float]) -> Callable[[str], float]:
        """Of a flow, with what it owes."""
        owed = defaultdict[str, float](float)
        for share, debt in zip(running, debts, strict=True):
            owed[share.flow] += debt
        return lambda flow: self._counters.of(flow) + owed[flow]

    def _may_give(self, share: Share, claimant: Share, *, is_above: bool) -> bool:
        """Whether the flow is far enough above, and has had its quantum for each place that it gave."""
        may = (is_above and share.priority == claimant.priority) or _is_lower(share, claimant)
        return may and self._had_since(share.flow) >= self._counters.rules.quantum

    @property
    def _most(self) -> float:
        return AT_ONCE * self._counters.rules.quantum

    def _had_since(self, flow: str) -> float:
        """Service since all that it gave was paid for, as far as that lets it give more; below 0 where it is not."""
        paid_at = self._paid_at.get(flow, float("-inf"))
        return min(self._counters.accounts.service_of(flow) - paid_at, self._most)


def _is_lower(share: Share, claimant: Share) -> bool:
    return RANKS[share.priority] > RANKS[claimant.priority]
