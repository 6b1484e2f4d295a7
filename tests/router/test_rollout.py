"""The judge of canaries: what it rolls back, what it widens, and how seldom chance misleads it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from serve_app.router.rollout import MIN_SCORED, Comparison, RolloutSettings, judge, mann_whitney, wilson

SETTINGS = RolloutSettings(requests=50)


def compared(
    *,
    num_requests: int = 50,
    num_failed: int = 0,
    num_beside: int = 400,
    num_failed_beside: int = 0,
    seconds: Callable[[int], float] = lambda at: 0.2 + at % 7 / 100,
    seconds_beside: Callable[[int], float] = lambda at: 0.2 + at % 7 / 100,
    divergences: tuple[float, ...] = (0.0,) * MIN_SCORED,
) -> Comparison:
    found = Comparison(num_scorable=len(divergences))
    for tally, of_all, failed, each in (
        (found.canary, num_requests, num_failed, seconds),
        (found.beside, num_beside, num_failed_beside, seconds_beside),
    ):
        for at in range(of_all):
            is_error = at < failed
            times = {} if is_error else {"first_s": each(at), "token_s": each(at) / 10}
            tally.note(is_error=is_error, **times)
    for value in divergences:
        found.score([value - 1.0], [-1.0])
    return found


def decision(found: Comparison, settings: RolloutSettings = SETTINGS) -> str:
    verdict = judge(found, settings)
    return "wait" if verdict is None else verdict.decision


def test_an_equal_canary_gets_more_once_both_have_enough_requests() -> None:
    assert decision(compared(num_requests=49)) == "wait"
    assert decision(compared(num_beside=49)) == "wait"
    assert decision(compared()) == "widen"


def test_what_could_be_scored_is_scored_before_a_canary_gets_more() -> None:
    found = compared(divergences=(0.0,) * (MIN_SCORED - 1))
    assert decision(found) == "wait"
    found.num_scorable = 0
    assert decision(found) == "widen"


@pytest.mark.parametrize(
    ("num_requests", "num_failed", "num_failed_beside", "expected"),
    [
        (20, 2, 0, "wait"),
        (20, 3, 0, "roll back"),
        (3, 3, 0, "roll back"),
        (3, 3, 400, "wait"),
        (49, 10, 80, "wait"),
        (49, 20, 80, "roll back"),
    ],
)
def test_a_canary_that_fails_more_is_rolled_back(
    num_requests: int, num_failed: int, num_failed_beside: int, expected: str
) -> None:
    found = compared(num_requests=num_requests, num_failed=num_failed, num_failed_beside=num_failed_beside)
    assert decision(found) == expected
    if expected == "roll back":
        verdict = judge(found, SETTINGS)
        assert verdict is not None
        assert f"more of its requests: {num_failed} of {num_requests} requests failed" in verdict.reason


def test_a_canary_whose_log_probabilities_diverge_is_rolled_back_after_few_requests() -> None:
    few = (5.0,) * (MIN_SCORED - 1)
    assert decision(compared(num_requests=4, divergences=few)) == "wait"
    assert decision(compared(num_requests=4, divergences=(*few, 6.0))) == "roll back"
    assert decision(compared(divergences=(0.3, 0.9, 0.1, 0.4) * 4)) == "widen", "it was trained further"
    assert decision(compared(num_requests=9, divergences=(0.1,) * 9 + (9.0,))) == "wait", "one request says little"
    assert decision(compared(divergences=(0.3,) * 9), replace(SETTINGS, max_divergence=0.1)) == "roll back"


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_a_version_that_gives_no_number_diverges(logprob: float) -> None:
    found = compared(num_requests=4, divergences=())
    for _ in range(MIN_SCORED):
        found.score([-1.0], [logprob])
    assert decision(found) == "roll back"


def test_a_slower_canary_is_rolled_back_when_it_has_enough_requests() -> None:
    assert decision(compared(num_requests=49, seconds=lambda at: 0.9)) == "wait"
    assert decision(compared(seconds=lambda at: 0.9)) == "roll back"
    assert decision(compared(seconds=lambda at: 0.3)) == "widen", "less than twice as long"
    assert decision(compared(seconds=lambda at: 0.009, seconds_beside=lambda at: 0.001)) == "widen", "all are quick"
    late = compared(seconds=lambda at: 0.9)
    verdict = judge(late, SETTINGS)
    assert verdict is not None
    assert "its first token takes" in verdict.reason


def test_few_slow_requests_roll_nothing_back() -> None:
    assert decision(compared(seconds=lambda at: 9.0 if at % 3 == 0 else 0.2)) == "widen"


def test_the_shares_follow_one_another_up_to_all() -> None:
    shares, share = [], 0.05
    while share < 1:
        shares.append(share)
        share = SETTINGS.after(share)
    assert shares == [0.05, 0.25, 0.5]
    assert SETTINGS.after(0.3) == 0.5


def test_an_equal_canary_is_seldom_rolled_back_by_chance() -> None:
    chance = random.Random(5)
    rolled_back = 0
    for _ in range(300):
        found = Comparison()
        for _ in range(60):
            for tally in (found.canary, *[found.beside] * 3):
                is_error = chance.random() < 0.05
                seconds = chance.lognormvariate(-1, 1)
                tally.note(is_error=is_error, first_s=seconds, token_s=seconds / 10)
            found.score([chance.gauss(-1, 1.5)], [-1.0])
            rolled_back += decision(found, replace(SETTINGS, requests=1000)) == "roll back"
        rolled_back += decision(found) == "roll back"
    assert rolled_back <= 3


def test_intervals_and_ranks_are_those_of_the_textbooks() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(10, 100)
    assert (round(low, 4), round(high, 4)) == (0.0407, 0.2253)
    assert mann_whitney([1, 2, 3], [1, 2, 3]) == 0
    assert round(mann_whitney([4, 5, 6], [1, 2, 3]), 4) == round(4.5 / math.sqrt(5.25), 4)
