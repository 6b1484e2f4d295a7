"""Meters of limits: what is free after what was taken, given back, and time."""

from __future__ import annotations

import random

import pytest

from serve_app.tenants.lending import MAX_PERIODS, Budget, Gauge, Window

DAY_S = 86_400.0


@pytest.mark.parametrize("seed", range(20))
def test_no_minute_has_more_than_the_limit_wherever_it_begins(seed: int) -> None:
    drawn = random.Random(seed)
    window, now, taken = Window(100), 5.0, []
    for _ in range(2000):
        now += drawn.choice([0.0, 0.01, 0.4, 3.0])
        amount = min(drawn.randint(1, 30), window.free(now))
        if amount:
            window.take(amount, now)
            taken.append((now, amount))
        within = [each for at, each in taken if now - 60 < at]
        assert sum(within) <= 100


@pytest.mark.parametrize("seed", range(20))
def test_what_is_given_back_never_makes_room_for_more_than_the_limit(seed: int) -> None:
    """Of what was taken, some is used; what was used within a minute is never more than the limit."""
    drawn = random.Random(seed)
    window, now, used = Window(100), 5.0, []
    open_: list[tuple[float, int]] = []
    for _ in range(2000):
        now += drawn.choice([0.0, 0.01, 0.4, 3.0])
        amount = min(drawn.randint(1, 30), window.free(now))
        if amount:
            window.take(amount, now)
            open_.append((now, amount))
        while open_ and drawn.random() < 0.5:
            at, reserved = open_.pop(drawn.randrange(len(open_)))
            spent = drawn.randint(0, reserved)
            window.give(reserved - spent, now)
            used.append((at, spent))
        assert sum(each for at, each in used if now - 60 < at) <= 100


@pytest.mark.parametrize("seed", range(20))
def test_who_waits_as_long_as_is_said_finds_enough(seed: int) -> None:
    drawn = random.Random(seed)
    window, now = Window(50), 0.0
    for _ in range(300):
        now += drawn.random() * 4
        window.take(min(drawn.randint(0, 20), window.free(now)), now)
        wanted = drawn.randint(1, 50)
        wait_s = window.wait_s(wanted, now)
        assert (wait_s == 0) == (window.free(now) >= wanted)
        later = Window(50)
        later._taken, later._total = window._taken.copy(), window._total
        assert later.free(now + wait_s) >= wanted


def test_a_whole_window_is_free_when_its_reset_has_come() -> None:
    window = Window(10)
    window.take(4, 3.2)
    window.take(6, 9.9)
    assert window.reset_s(10.0) == pytest.approx(59.9)
    assert (window.free(69.8), window.free(70.0), window.reset_s(70.0)) == (4, 10, 0.0)


def test_nobody_waits_for_more_than_a_minute_and_what_is_kept_is_bounded() -> None:
    """Clients obey no longer times than that, and a thousand a second may ask."""
    window, now = Window(10**9), 1000.0
    for number in range(100_000):
        now += 0.001
        window.take(1, now)
        if number % 1000 == 0:
            assert 0 < window.reset_s(now) <= 60 + 1e-9
            assert window.wait_s(10**9, now) <= 60 + 1e-9
    assert len(window._taken) <= 602


def test_a_gauge_is_free_again_as_soon_as_it_is_given_back() -> None:
    gauge = Gauge(3)
    gauge.take(3, 0.0)
    assert (gauge.free(0.0), gauge.wait_s(1, 0.0) > 0) == (0, True)
    gauge.give(2, 0.0)
    assert (gauge.free(0.0), gauge.wait_s(1, 0.0)) == (2, 0.0)


@pytest.mark.parametrize(("is_monthly", "day"), [(False, 1), (True, 32)])
def test_a_budget_begins_anew_with_its_period_and_not_when_a_clock_is_set_back(is_monthly: bool, day: int) -> None:
    budget = Budget(100, is_monthly=is_monthly)
    budget.take(100, 100.0)  # the first of January 1970
    assert budget.wait_s(1, 100.0) == budget.reset_s(100.0) == (31 if is_monthly else 1) * DAY_S - 100.0
    assert budget.free(day * DAY_S) == 100
    budget.take(60, day * DAY_S)
    assert (budget.free(0.0), budget.free(day * DAY_S + 1)) == (0, 40)


def test_a_budget_whose_clock_was_ahead_goes_on_where_it_was() -> None:
    budget = Budget(100, is_monthly=False)
    budget.take(70, 0.5 * DAY_S)
    budget.take(100, 50 * DAY_S)  # the clock was set ahead, and is set back
    assert (budget.free(0.6 * DAY_S), budget.free(50 * DAY_S)) == (30, 0)
    assert (budget.knows("1970-01-02"), budget.knows("1970-02-21")) == (False, True)
    assert budget.free(1.5 * DAY_S) == 0, "what was spent on that day nobody has said yet"
    budget.tell("1970-01-02", 10)
    budget.tell("1970-01-01", 0)
    assert [budget.free(day * DAY_S) for day in (1.5, 0.6, 50, 51)] == [90, 30, 0, 100]


def test_a_budget_is_given_back_to_the_period_it_was_taken_in() -> None:
    budget = Budget(100, is_monthly=False)
    budget.take(90, 0.9 * DAY_S)
    budget.take(100, 1.1 * DAY_S)
    budget.give(90, "1970-01-01")
    budget.give(90, "1969-12-31")
    assert (budget.free(1.2 * DAY_S), budget.free(0.95 * DAY_S)) == (0, 100)


def test_a_budget_keeps_few_periods_whatever_its_clock_does() -> None:
    budget = Budget(100, is_monthly=False)
    for day in range(3 * MAX_PERIODS):
        budget.take(1, day * DAY_S)
    assert len(budget._spent) == MAX_PERIODS
    assert budget.free((3 * MAX_PERIODS - 2) * DAY_S) == 99


def test_a_budget_knows_what_was_spent_before_it_began_to_count() -> None:
    assert Budget(100, is_monthly=False, period="1970-01-01", spent=70).free(5.0) == 30
    assert Budget(100, is_monthly=False, period="1969-12-31", spent=70).free(5.0) == 100
