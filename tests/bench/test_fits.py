"""Exponents are found again, and what bends upward is told from what does not, noise or not."""

from __future__ import annotations

import random

import pytest

from benchmarks.fits import fit

WORK = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


def costs(fixed: float, slope: float, exponent: float, noise: float = 0.0) -> list[float]:
    draw = random.Random(1)
    return [(fixed + slope * each**exponent) * (1 + noise * draw.uniform(-1, 1)) for each in WORK]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("fixed", [0.0, 3.0])
def test_the_exponent_and_the_fixed_part_are_found_again(exponent: float, fixed: float) -> None:
    found = fit(WORK, costs(fixed, 0.7, exponent))
    assert found.exponent == pytest.approx(exponent, abs=0.051)
    assert found.fixed == pytest.approx(fixed, abs=0.1)
    assert found.error < 1e-2


@pytest.mark.parametrize(("exponent", "bends"), [(0.5, False), (1.0, False), (1.5, True), (2.0, True)])
def test_what_grows_faster_than_its_work_is_named_through_some_noise(exponent: float, bends: bool) -> None:
    assert fit(WORK, costs(2.0, 0.5, exponent, noise=0.04)).bends_upward is bends


def test_a_constant_cost_does_not_bend_whatever_the_noise_looks_like() -> None:
    draw = random.Random(2)
    for _ in range(50):
        found = fit(WORK, [10 + draw.uniform(-0.5, 0.5) for _ in WORK])
        assert not found.bends_upward


def test_a_falling_cost_is_no_negative_slope() -> None:
    found = fit(WORK, [10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    assert (found.slope, found.bends_upward) == (0.0, False)
