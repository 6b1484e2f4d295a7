"""Fits the costs of steps to bursts that were measured: the simulation says of which steps each burst was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from serve_app.engine.config import EngineConfig
from serve_app.whatif.costs import Observation, StepCosts, Work, fit
from serve_app.whatif.simulation import Service, work_of
from serve_app.whatif.trace import Asked

FIRST_GUESS = StepCosts(steps=0.02, prompt_tokens=0.001, rows=0.002)
ROUNDS = 4
"""Which steps there are depends on their costs, a little: each round starts from the costs of the one before."""
LATER_S = 3600.0
"""By when what was sent before a burst has ended."""


class Measured(NamedTuple):
    """A burst: requests that were sent at once, and the seconds until the last answer. before: what was sent earlier"""

    asked: Sequence[Asked]
    seconds: float
    before: Sequence[Asked] = ()

    @property
    def told(self) -> dict[str, object]:
        sizes = [(each.input_tokens, each.output_tokens, each.model) for each in self.asked]
        return {"requests": sizes, "is_known": self.before == self.asked, "seconds": self.seconds}


def fit_costs(measured: Sequence[Measured], config: EngineConfig, known: Mapping[str, float]) -> StepCosts:
    """Return the costs. known: further members of StepCosts, as the service told them. Raises Unusable as `fit`."""
    costs = replace(FIRST_GUESS, **known)  # type: ignore[arg-type]
    for _ in range(ROUNDS):
        service = Service(config=config, costs=costs)
        found = fit([Observation(_work(each, service), each.seconds) for each in measured])
        costs = replace(found, **known)  # type: ignore[arg-type]
    return costs


def _work(measured: Measured, service: Service) -> Work:
    if not measured.before:
        return work_of(measured.asked, service)
    later = [replace(each, at_s=LATER_S) for each in measured.asked]
    return work_of([*measured.before, *later], service).plus(work_of(measured.before, service), times=-1.0)
