"""Leases count only the time in which somebody listened; departures predict waits."""

from __future__ import annotations

from serve_app.replica.delivery import Leases
from serve_app.replica.requests import Departures


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_router_that_falls_silent_expires_once_and_one_that_speaks_does_not() -> None:
    clock = Clock()
    leases = Leases(10.0, clock)
    leases.hear("silent")
    expired = []
    for _ in range(8):
        clock.now += leases.period_s
        leases.hear("speaking")
        expired += leases.expired()
    assert expired == ["silent"]


def test_a_watcher_that_overslept_holds_nobody_to_account_for_it() -> None:
    clock = Clock()
    leases = Leases(10.0, clock)
    leases.hear("router")
    clock.now += leases.period_s + 1000.0
    assert leases.expired() == []


def test_a_router_that_stays_silent_after_a_stall_expires_after_the_rest_of_its_lease() -> None:
    clock = Clock()
    leases = Leases(10.0, clock)
    leases.hear("router")
    clock.now += 20.0
    found = [leases.expired()]
    for _ in range(4):
        clock.now += leases.period_s
        found.append(leases.expired())
    assert found == [[], [], [], [], ["router"]]


def test_a_wait_is_predicted_from_how_fast_sequences_ended() -> None:
    clock = Clock()
    departures = Departures(clock)
    assert departures.wait_s(1000) == 1  # nothing is known yet
    for _ in range(11):
        departures.note()
        clock.now += 0.5
    clock.now -= 0.5
    assert departures.wait_s(20) == 10
    assert departures.wait_s(1) == 1
    assert departures.wait_s(10**6) == 60


def test_a_queue_that_has_stopped_moving_is_predicted_to_take_longer() -> None:
    clock = Clock()
    departures = Departures(clock)
    for _ in range(11):
        departures.note()
        clock.now += 0.5
    before = departures.wait_s(10)
    clock.now += 30
    assert departures.wait_s(10) > before
