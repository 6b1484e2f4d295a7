"""Divides what a step may compute, so that the flows' virtual counters come as close to each other as they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from serve_app.engine.scheduler.turns import Key

LEAST_LUMP = 16
MOST_LUMPS = 4
"""So many tokens, or the part of what there is that one of so many would have, are not divided further: a step cut into
crumbs costs more, and prompts that are computed side by side all begin to decode late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one flow's requests of one class could use.

    key:    of their turn: class, virtual counter, number
    weight: of their flow
    wanted: tokens
    """

    key: Key
    weight: float
    wanted: int


def filled(claims: Sequence[Claim], amount: int, *, price: float) -> list[int]:
    """Tokens for each claim: higher classes first, in a class the lowest counters raised until all are level.

    Those that are first get a lump more, at the cost of those that are last, who are first the next time.

    price: service that a token is charged as

    What is given comes to `amount`, or to all that is wanted; O(claims · log claims).
    """
    given = [0] * len(claims)
    order = sorted(range(len(claims)), key=lambda place: claims[place].key)
    for _, places in groupby(order, key=lambda place: claims[place].key[0]):
        group = list(places)
        level = _level([claims[place] for place in group], amount * price, price)
        left, lump = amount, max(LEAST_LUMP, amount // MOST_LUMPS)
        for place in group:
            claim = claims[place]
            raised = max(0.0, level - claim.key[1]) * claim.weight / price
            given[place] = min(claim.wanted, int(raised) + lump, left)
            left -= given[place]
        for place in group:  # what rounding left, to those that are first
            more = min(claims[place].wanted - given[place], left)
            given[place] += more
            left -= more
        amount = left
    return given


def _level(claims: Sequence[Claim], service: float, price: float) -> float:
    """The counter to which so much service raises those below it, none further than it wants."""
    begins = [(claim.key[1], claim.weight) for claim in claims]
    ends = [(claim.key[1] + claim.wanted * price / claim.weight, -claim.weight) for claim in claims]
    events = sorted(begins + ends)
    level, slope = events[0][0], 0.0
    for at, change in events:
        if slope * (at - level) >= service:
            break
        service -= slope * (at - level)
        level, slope = at, slope + change
    return level + service / slope if slope > 1e-12 else level
