"""Who was refused and comes when told to finds a place, though others ask again as soon as they are answered."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter

import pytest

from serve_app.http.bookings import GRACE_S, Bookings
from serve_app.http.turnstile import Turnstile, TurnstileSettings
from serve_app.http.visits import Visit

PACE = 20.0


def first_retries(
    *, num_clients: int, seconds: float, tenants: int, settled_s: float = 50
) -> tuple[Counter[str], int, int]:
    """Closed loops through a full proxy, in simulated time: how first retries ended, how much was done, and how often
    nothing was inside though somebody wanted to be. All requests take their turns in a service of that pace, which the
    proxy has to find out first: first retries count when that has settled.
    """
    random.seed(1)  # of the appointments
    now, drawn, order = 0.0, random.Random(1), itertools.count()
    turnstile = Turnstile(TurnstileSettings(), clock=lambda: now)
    if tenants > 1:
        turnstile.flows.learn([(b"x-api-key", b"any")], "any")
    events: list[tuple[float, int, int, int]] = []  # when, order, client, how often it was refused in a row
    inside: list[tuple[Visit, int]] = []
    ended, num_done, num_idle = Counter[str](answered=0, refused=0), 0, 0
    for client in range(num_clients):
        heapq.heappush(events, (drawn.random(), next(order), client, -1))
    next_done = 1.0
    while now < seconds:
        now = min(events[0][0] if events else next_done, next_done)
        if now == next_done:
            next_done += drawn.expovariate(PACE)
            begun = [each for each in inside if each[0].has_begun]
            if not begun:
                num_idle += now > 2
                continue
            inside.remove(begun[0])
            begun[0][0].leave()
            num_done += 1
            heapq.heappush(events, (now + 0.002, next(order), begun[0][1], 0))
            continue
        _, _, client, num_refused = heapq.heappop(events)
        flow = f"of {client % tenants}"
        is_due = num_refused != 0 and turnstile.keep(flow)  # not where its last request was just answered
        if turnstile.is_full(flow, is_due=is_due):
            ended["refused"] += num_refused == 1 and now > settled_s
            retry_after_s = turnstile.refuse(flow)
            again = max(0, num_refused) + 1
            heapq.heappush(events, (now + retry_after_s + 0.01 * drawn.random(), next(order), client, again))
        else:
            ended["answered"] += num_refused == 1 and now > settled_s
            inside.append((turnstile.enter(lambda: None, flow, is_due=is_due), client))
    return ended, num_done, num_idle


@pytest.mark.parametrize("tenants", [1, 2])
@pytest.mark.parametrize("num_clients", [300, 400])
def test_nearly_all_who_come_when_told_are_let_in_and_nothing_stands_idle(num_clients: int, tenants: int) -> None:
    ended, num_done, num_idle = first_retries(num_clients=num_clients, seconds=120, tenants=tenants)
    assert ended["answered"] >= 200
    assert ended["answered"] >= 0.95 * ended.total()
    assert num_idle == 0
    assert num_done >= 0.9 * 119 * PACE


@pytest.mark.parametrize("tenants", [1, 5])
def test_who_is_refused_before_any_pace_is_known_is_let_in_when_it_comes_as_told(tenants: int) -> None:
    """A proxy that believes in a pace four times too high tells its first ones to come too early."""
    ended, *_ = first_retries(num_clients=400, seconds=40, tenants=tenants, settled_s=0)
    assert ended["answered"] >= 200
    assert ended["refused"] <= 0.01 * ended.total()


def test_places_beyond_all_are_for_those_who_were_told_to_come_and_half_as_many_at_most() -> None:
    now = 100.5
    turnstile = Turnstile(TurnstileSettings(max_requests=8), clock=lambda: now)
    inside = [turnstile.enter(lambda: None) for _ in range(8)]
    assert turnstile.is_full()
    for _ in range(4):
        assert not turnstile.is_full(is_due=True)
        inside.append(turnstile.enter(lambda: None, is_due=True))
    assert turnstile.is_full(is_due=True)
    inside.pop().leave()
    assert turnstile.is_full()
    assert not turnstile.is_full(is_due=True)
    for visit in inside:
        visit.leave()
    assert turnstile.num_inside == 0
    assert [turnstile.is_full(is_due=is_due) for is_due in (True, False)] == [False, False]


def test_nobody_is_waited_for_without_end_and_nobody_twice() -> None:
    now = 100.5
    bookings = Bookings(max_s=30, clock=lambda: now)
    told = [bookings.make(pace_per_s=1.0) for _ in range(5)]
    assert bookings.num_due == 0
    now += told[1] + 0.1
    due = bookings.num_due
    assert due == sum(each <= told[1] for each in told)
    assert bookings.keep()
    assert bookings.num_due == due - 1
    now += 60 + GRACE_S
    assert bookings.num_due == 0
    assert not bookings.keep()
    assert not bookings._by_second
