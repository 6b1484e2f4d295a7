"""Whether somebody who runs gives its place to whose turn it is, where no place is free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from serve_app.core.shares import Share
from serve_app.engine.fairness.counters import Counters
from serve_app.engine.fairness.turns import RANKS

MAX_KNOWN = 1024
"""Flows of which it is known what they had when they gave a place; those beyond have had their quantum since."""
PAID = 4
"""What was lost with a place is computed again; so many times as much is computed before its flow gives another."""


class Places:
    """A place is given by a flow of a lower class, or by one that is a quantum further above its share and has more
    places for its weight than the other would have then.

    Law: between two places that a flow gives, a quantum is computed for it, and PAID times what it had to compute
    again. So what is computed again is a bounded part of what is computed, whoever comes and whatever they ask.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._service_at: dict[str, float] = {}
        self.num_given = 0

    def giver(
        self, running: Sequence[Share], claimant: Share, *, debt: float, resumes: Callable[[int], bool]
    ) -> int | None:
        """Which of those that run, oldest first, gives its place up: the youngest of its flow; None where nobody does.

        debt:    of the claimant's flow, as counters count
        resumes: whether one would go on where it was, with next to nothing computed again
        """
        shares = {(share.flow, share.priority): share for share in running if share.flow != claimant.flow}
        least = self._counters.of(claimant.flow) + debt + self._counters.rules.quantum
        able = [name for name, share in shares.items() if self._may_give(share, claimant, least)]
        if not able:
            return None
        num_places = Counter(share.flow for share in running)
        wanted = (num_places[claimant.flow] + 1) / claimant.weight
        found = [
            (RANKS[share.priority], self._counters.of(share.flow), place)
            for place, share in enumerate(running)
            if (share.flow, share.priority) in able
            and (_is_lower(share, claimant) or wanted <= num_places[share.flow] / share.weight)
            and resumes(place)
        ]
        return max(found)[2] if found else None

    def is_behind(self, running: Sequence[Share], claimant: Share, *, debt: float) -> bool:
        """Whether all places are taken by others: one of a lower class, or one that was served more and has more places
        for its weight than the claimant would have with one of those that are spare."""
        num_places = Counter(share.flow for share in running)
        wanted = (num_places[claimant.flow] + 1) / claimant.weight
        served = self._counters.of(claimant.flow) + debt
        others = {(share.flow, share.priority): share for share in running if share.flow != claimant.flow}
        return any(
            _is_lower(share, claimant)
            or (
                share.priority == claimant.priority
                and self._counters.of(share.flow) > served
                and num_places[share.flow] / share.weight >= wanted
            )
            for share in others.values()
        )

    def note_given(self, flow: str) -> None:
        """A place of this flow was given."""
        self.num_given += 1
        self._keeps_from(flow, self._counters.accounts.service_of(flow))

    def note_lost(self, flow: str, num_tokens: int) -> None:
        """So many tokens of this flow are computed again: what it gave a place for was not kept."""
        service = self._counters.accounts.service_of(flow)
        lost = PAID * self._counters.rules.prefill_weight * num_tokens
        self._keeps_from(flow, max(self._service_at.get(flow, 0.0), service) + lost)

    def _keeps_from(self, flow: str, service: float) -> None:
        """The flow gives nothing until it has had a quantum more than that."""
        if len(self._service_at) >= MAX_KNOWN:
            self._service_at = {each: at for each, at in self._service_at.items() if not self._had_quantum(each)}
        self._service_at[flow] = service

    def _may_give(self, share: Share, claimant: Share, least: float) -> bool:
        """Whether the flow is far enough above, and has had its quantum since it gave a place last."""
        is_above = share.priority == claimant.priority and self._counters.of(share.flow) > least
        return (is_above or _is_lower(share, claimant)) and self._had_quantum(share.flow)

    def _had_quantum(self, flow: str) -> bool:
        had = self._counters.accounts.service_of(flow) - self._service_at.get(flow, 0.0)
        return had >= self._counters.rules.quantum


def _is_lower(share: Share, claimant: Share) -> bool:
    return RANKS[share.priority] > RANKS[claimant.priority]
