"""Costs of steps: found again from what they made, and read from nothing else than costs."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from serve_app.whatif.costs import Observation, StepCosts, Work, fit
from serve_app.whatif.trace import Unusable

TRUE = StepCosts(steps=0.02, prompt_tokens=0.001, prompt_pairs=1e-7, rows=0.003, context=1e-5, request_s=0.004)


def bursts(number: int, *, noise: float = 0.0) -> list[Observation]:
    random = Random(0)
    works = [
        Work(
            steps=random.randint(1, 64), prompt_tokens=random.randint(32, 4096), rows=random.randint(0, 500),
            prompt_pairs=random.randint(500, 8_000_000), context=random.randint(0, 200_000),
        )
        for _ in range(number)
    ]  # fmt: skip
    return [
        Observation(work, (TRUE.request_s + TRUE.of(work)) * random.uniform(1 - noise, 1 + noise)) for work in works
    ]


def test_costs_are_found_again() -> None:
    found = fit(bursts(40))
    for name in ("steps", "prompt_tokens", "prompt_pairs", "rows", "context"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02)
    assert found.error < 0.001


def test_noise_makes_no_cost_negative() -> None:
    found = fit(bursts(40, noise=0.2))
    assert min(found.steps, found.prompt_pairs, found.context, found.request_s) >= 0
    assert found.adapters == 0, "nothing was seen of them"
    assert 0 < found.error < 0.2


def test_as_many_bursts_are_wanted_as_there_are_kinds_of_work() -> None:
    with pytest.raises(Unusable, match="6 kinds of work need as many observations; found 5"):
        fit(bursts(5))


def test_costs_are_written_and_read(tmp_path: Path) -> None:
    TRUE.write(str(tmp_path / "steps.json"))
    assert StepCosts.read(str(tmp_path / "steps.json")) == TRUE


@pytest.mark.parametrize(
    "text", ["{}", "[]", "nothing", '{"steps": 0, "prompt_tokens": 1, "rows": 1}', '{"steps": 1, "rows": 1, "pie": 3}']
)
def test_what_holds_no_costs_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "steps.json"
    file.write_text(text)
    with pytest.raises(Unusable, match=r"steps\.json"):
        StepCosts.read(str(file))
