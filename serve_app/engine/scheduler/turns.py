"""The policy: one key by which those that wait are put in order. Least first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.shares import Share

RANKS = {"interactive": 0, "standard": 1, "batch": 2}

A_MOMENT_S = 1e-6
"""Whoever looks so much later finds that age has changed a key, however times are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What service is worth, and how far order may bend. In units of service; a token of a prompt is usually one.

    prefill_weight: of a position that is computed without anything being drawn after it
    decode_weight:  of a token that is drawn
    swap_weight:    of an adapter that is brought
    quantum:        so much more than the others a flow may get before its turn ends, so that what is warm is used
    age_s:          who has waited so long counts as of the next higher class, after as long again as of the highest
    max_wait_s:     who has had no turn for so long is next, whatever else there is
    """

    prefill_weight: float = 1.0
    decode_weight: float = 2.0
    swap_weight: float = 256.0
    quantum: float = 256.0
    age_s: float = 5.0
    max_wait_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the order of a flow's requests of one class follows from.

    counter:  service of the flow, divided by its weight
    since:    when they began to wait, or last had a turn; seconds
    is_kept:  the turn is theirs already, or what they need is there and not what others need
    number:   in which they came to wait
    """

    share: Share
    counter: float
    since: float = 0.0
    is_kept: bool = False
    number: int = 0


Key = tuple[int, float, int]
DebtOf = Callable[[str], float]
"""Of a flow: what those of it that have begun will be charged for, divided by its weight."""


def turn_key(standing: Standing, rules: Rules, *, now: float) -> Key:
    """Class, then virtual counter, then order of coming; age raises the class, and in the end beats everything.

    With one flow there is one standing, and its requests go in the order in which they came.
    """
    waited_s = now - standing.since
    if waited_s > rules.max_wait_s:
        return -1, standing.since, standing.number
    rank = max(0, RANKS[standing.share.priority] - int(waited_s / rules.age_s))
    return rank, standing.counter - (rules.quantum if standing.is_kept else 0.0), standing.number


def with_debt(key: Key, debt: float) -> Key:
    """The same with what is owed to those of the flow that have begun; whose age has beaten all else it moves not."""
    rank, counter, number = key
    return (rank, counter + debt, number) if debt and rank >= 0 else key


def next_rise(since: float, rules: Rules, *, now: float) -> float:
    """When age changes the key of those who wait since then."""
    waited_s = now - since
    rises = (int(waited_s / rules.age_s) + 1) * rules.age_s
    return since + (min(rises, rules.max_wait_s) if waited_s <= rules.max_wait_s else rises) + A_MOMENT_S
