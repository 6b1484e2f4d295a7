"""Prompt work beside decoding sequences follows what it was seen to cost."""

from __future__ import annotations

import pytest

from serve_app.engine.pace import LEAST_ALLOWANCE, Pace


def settle(pace: Pace, *, decode_s: float, token_s: float, fixed_s: float = 0.0, rounds: int = 60) -> int:
    """Make steps on a machine of these costs until the allowance has settled."""
    for _ in range(rounds):
        pace.note(8, 0, decode_s)
        allowed = pace.allowance(8, 100_000)
        pace.note(8, allowed, decode_s + fixed_s + token_s * allowed)
    return pace.allowance(8, 100_000)


def test_without_decoding_sequences_the_whole_budget_is_allowed() -> None:
    assert Pace(1.5).allowance(0, 512) == 512


@pytest.mark.parametrize(("decode_s", "token_s"), [(0.150, 0.0012), (0.008, 0.00005), (0.100, 0.01)])
def test_a_step_with_prompt_work_takes_no_longer_than_its_stretch(decode_s: float, token_s: float) -> None:
    allowed = settle(Pace(1.75), decode_s=decode_s, token_s=token_s)
    expected = max(LEAST_ALLOWANCE, 0.75 * decode_s / token_s)
    assert allowed == pytest.approx(expected, rel=0.15)


def test_a_fixed_cost_of_prompt_work_does_not_starve_it() -> None:
    allowed = settle(Pace(1.75), decode_s=0.010, token_s=0.00005, fixed_s=0.003)
    assert allowed == pytest.approx((0.0075 - 0.003) / 0.00005, rel=0.2)


def test_a_step_with_little_prompt_work_says_nothing_of_more() -> None:
    pace = Pace(2.0)
    before = settle(pace, decode_s=0.1, token_s=0.001)
    for _ in range(20):
        pace.note(8, 3, 0.1001)
    assert pace.allowance(8, 100_000) == before


def test_one_slow_step_does_not_stop_prompts() -> None:
    pace = Pace(2.0)
    before = settle(pace, decode_s=0.1, token_s=0.001)
    pace.note(8, before, 30.0)
    assert pace.allowance(8, 100_000) >= before / 2


def test_something_is_always_allowed() -> None:
    pace = Pace(1.1)
    settle(pace, decode_s=0.001, token_s=1.0)
    assert pace.allowance(64, 512) >= 1
