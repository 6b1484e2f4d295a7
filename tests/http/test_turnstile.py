"""Clients that keep the appointments of a full proxy leave no place empty and are seldom refused twice."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections import deque
from dataclasses import dataclass, field

import pytest

from serve_app.http.turnstile import (
    BOOKED,
    MAX_REQUESTS,
    MAX_RETRY_S,
    MAX_WAIT_S,
    MIN_HANDED_ON,
    PAUSE_S,
    REPORT_PERIOD_S,
    Turnstile,
    TurnstileSettings,
    settings_of_environment,
)
from serve_app.http.visits import Visit
from serve_app.router.appointments import JITTER

PACE = 40.0
"""Requests per second that the simulated service completes, one after another."""


@dataclass
class Service:
    """Behind a turnstile, in simulated time. done: when each was complete;  refused: when, and Retry-After"""

    now: float = 0.0
    num_empty_s: float = 0.0
    done: list[float] = field(default_factory=list)
    refused: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turnstile = Turnstile(clock=lambda: self.now)
        self.inside: deque[Visit] = deque()

    def run(self, num_clients: int, *, until: float) -> None:
        """A closed loop of clients that keep their appointments."""
        order = itertools.count()
        coming: list[tuple[float, int]] = [(0.0, next(order)) for _ in range(num_clients)]
        next_done = 0.0
        while (at := min(coming[0][0] if coming else until, next_done if self.turnstile.num_inside else until)) < until:
            self.now = at
            if self.turnstile.num_inside and next_done <= at:
                self.inside.popleft().leave()
                self.done.append(at)
                next_done = at + 1 / PACE
                heapq.heappush(coming, (at, next(order)))
                continue
            heapq.heappop(coming)
            if self.turnstile.is_full():
                self.refused.append((at, self.turnstile.refuse()))
                heapq.heappush(coming, (at + self.refused[-1][1], next(order)))
            else:
                next_done = next_done if self.turnstile.num_inside else at + 1 / PACE
                self.inside.append(self.turnstile.enter(lambda: None))


def test_of_1800_clients_that_keep_their_appointments_few_are_refused_and_no_place_stands_empty() -> None:
    service = Service()
    service.run(1800, until=60)
    assert len(service.done) >= 0.99 * 60 * PACE
    late = [at for at, _ in service.refused if at >= 2]
    assert len(late) < 2 * len(service.done)


@pytest.mark.slow
def test_appointments_are_seconds_at_first_and_never_more_than_half_a_minute() -> None:
    service = Service()
    service.run(1800, until=0.01)
    told = [seconds for _, seconds in service.refused]
    assert (len(told), min(told)) == (1800 - 256, 1)
    assert sorted(told)[len(told) // 2] <= 15
    assert len(set(told)) > 10, "they do not come back together"
    service.run(100_000, until=0.01)
    assert max(seconds for _, seconds in service.refused) <= math.ceil(MAX_RETRY_S * (1 + JITTER))


def test_appointments_follow_the_pace_at_which_places_become_free() -> None:
    now = 0.0
    turnstile = Turnstile(TurnstileSettings(max_requests=10), clock=lambda: now)
    inside = deque(turnstile.enter(lambda: None) for _ in range(10))
    for _ in range(60):  # one in two seconds
        now += 2.0
        inside.popleft().leave()
        inside.append(turnstile.enter(lambda: None))
    told = [turnstile.refuse() for _ in range(5)]
    assert 8 <= told[-1] * BOOKED <= 14


def test_nobody_waits_for_longer_than_a_few_seconds_at_the_pace_that_was_measured() -> None:
    now = 0.0
    turnstile = Turnstile(TurnstileSettings(max_requests=1000), clock=lambda: now)
    inside = deque(turnstile.enter(lambda: None) for _ in range(MIN_HANDED_ON))
    for _ in range(120):  # one in two seconds: streams, say
        now += 2.0
        inside.popleft().leave()
        assert not turnstile.is_full()
        inside.append(turnstile.enter(lambda: None))
    num_waiting = 0
    while not turnstile.is_full():
        turnstile.enter(lambda: None)
        num_waiting += 1
    assert 0.5 * MAX_WAIT_S / 2 <= num_waiting <= 2 * MAX_WAIT_S / 2


def test_the_environment_says_how_many_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MAX_REQUESTS, raising=False)
    monkeypatch.delenv(PAUSE_S, raising=False)
    assert settings_of_environment() == TurnstileSettings()
    monkeypatch.setenv(MAX_REQUESTS, "7")
    monkeypatch.setenv(PAUSE_S, "0")
    assert settings_of_environment() == TurnstileSettings(max_requests=7, pause_s=0.0)
    monkeypatch.setenv(MAX_REQUESTS, "0")
    with pytest.raises(ValueError, match="at least 1; found 0"):
        settings_of_environment()
    monkeypatch.delenv(MAX_REQUESTS)
    monkeypatch.setenv(PAUSE_S, "31")
    with pytest.raises(ValueError, match="from 0 to 30; found 31"):
        settings_of_environment()


def test_what_is_refused_is_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    turnstile = Turnstile(clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            turnstile.refuse()
            turnstile.refuse_again()
        now += REPORT_PERIOD_S
        turnstile.refuse()
    assert [record.args for record in caplog.records] == [(1, 0, 0), (200, 0, 0)]
