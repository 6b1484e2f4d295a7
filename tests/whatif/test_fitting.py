"""Costs are found from the times of bursts alone, as the simulation knows the steps of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.cli.whatif import bursts
from serve_app.engine.config import EngineConfig
from serve_app.whatif.costs import StepCosts
from serve_app.whatif.fitting import LATER_S, Measured, fit_costs
from serve_app.whatif.simulation import Service, work_of

TRUE = StepCosts(
    steps=0.03, prompt_tokens=0.0011, rows=0.003, chunks=0.004, context=1e-5, prompt_pairs=2e-7,
    adapters=0.001, request_s=0.01, num_blocks=2048,
)  # fmt: skip
CONFIG = EngineConfig(name="tiny", path="", max_num_sequences=16)


def measured(service: Service) -> list[Measured]:
    """What the bursts would take with these costs."""
    found = []
    for at, burst in enumerate(bursts(16, 4)):
        names = [f"tiny:a{number}" for number in range(burst.adapters)] or ["tiny"]
        asked = burst.asked(str(at), names)
        before = burst.before(asked, names)
        later = [*before, *(replace(each, at_s=LATER_S) for each in asked)]
        work = work_of(later, service).plus(work_of(before, service), times=-1.0)
        found.append(Measured(asked, TRUE.request_s + TRUE.of(work), before))
    return found


def test_costs_are_found_again_from_the_times_of_bursts() -> None:
    found = fit_costs(measured(Service(config=CONFIG, costs=TRUE)), CONFIG, {"num_blocks": 2048})
    assert found.error < 0.001
    for name in ("steps", "prompt_tokens", "rows", "chunks", "adapters", "context"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
