"""However many requests one tenant sends at once, another one's come in, and have their turn soon."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from serve_app.http.turnstile import KEPT, LEAST_EACH, MAX_BOOKS, Turnstile, TurnstileSettings
from serve_app.http.visits import Visit

NUM_SLOTS = 64


class Proxy:
    """A turnstile that knows tenants, and what was handed on, in its order."""

    def __init__(self, max_requests: int = 256, num_slots: int = NUM_SLOTS) -> None:
        self.now = 0.0
        self.turnstile = Turnstile(TurnstileSettings(max_requests=max_requests), clock=lambda: self.now)
        self.turnstile.num_slots = num_slots
        self.turnstile.flows.learn([(b"x-api-key", b"any")], "some tenant")
        self.handed_on: deque[Visit] = deque()

    def ask(self, flow: str) -> Visit | None:
        """None where it is refused."""
        if self.turnstile.is_full(flow):
            return None
        visits: list[Visit] = []
        visit = self.turnstile.enter(lambda: self.handed_on.append(visits[0]) if visits else None, flow)
        visits.append(visit)
        if visit.has_begun:
            self.handed_on.append(visit)
        return visit

    def fill(self, flow: str) -> int:
        num_before = self.turnstile.num_inside
        while self.ask(flow) is not None:
            pass
        return self.turnstile.num_inside - num_before

    def complete_one(self) -> None:
        self.now += 0.02
        self.handed_on.popleft().leave()


def test_whoever_wants_all_leaves_places_for_others() -> None:
    proxy = Proxy()
    assert 128 <= proxy.fill("greedy") <= 200
    for number in range(10):
        assert proxy.ask(f"other {number}") is not None


def test_of_many_that_want_all_each_has_as_much_and_the_next_one_comes_in() -> None:
    proxy = Proxy()
    for _ in range(2000):
        proxy.ask(f"greedy {proxy.turnstile.num_refused % 19}")
        proxy.turnstile.num_refused += 1
        if len(proxy.handed_on) > 60 and random.Random(proxy.turnstile.num_refused).random() < 0.5:
            proxy.complete_one()
    assert proxy.ask("the next one") is not None
    inside = Counter(visit.flow for visit in proxy.handed_on)
    assert max(inside.values()) <= 2 * min(inside[f"greedy {number}"] for number in range(19))


def test_a_crowd_where_others_have_just_left_waits_for_no_more_than_is_left_of_the_pace() -> None:
    proxy = Proxy()
    for number in range(600):
        proxy.ask(f"other {number % 19}")
        proxy.complete_one()
    num_there = proxy.fill("greedy")
    num_waiting = num_there - len(proxy.handed_on)
    assert len(proxy.handed_on) >= NUM_SLOTS, "no slot stands empty for it"
    assert 0 < num_waiting <= 5 * 0.15 * proxy.turnstile._pace.per_s
    while proxy.handed_on:
        proxy.complete_one()
    proxy.now += 40.0
    assert proxy.fill("another one") > 1.5 * num_there, "they are forgotten"


@pytest.mark.parametrize(("num_slots", "filled"), [(0, 56), (4, 32), (32, 40), (64, 80)])
def test_places_are_kept_for_who_comes_next_and_no_slot_of_a_replica_stands_empty_for_it(
    num_slots: int, filled: int
) -> None:
    proxy = Proxy(num_slots=num_slots)
    proxy.fill("greedy")
    assert len(proxy.handed_on) == filled >= num_slots
    for number in range(max(proxy.turnstile.max_handed_on // KEPT, 4)):
        visit = proxy.ask(f"other {number}")
        assert visit is not None
        assert visit.has_begun


def test_who_has_few_is_handed_on_whatever_others_have_as_long_as_all_together_are_not_very_many() -> None:
    proxy = Proxy(max_requests=2000)
    proxy.fill("greedy")
    for _ in range(8):
        for number in range(40):
            assert proxy.ask(f"other {number}") is not None
    inside = Counter(visit.flow for visit in proxy.handed_on)
    others = [inside[f"other {number}"] for number in range(40)]
    assert 2 <= min(others) <= max(others) <= LEAST_EACH
    assert len(proxy.handed_on) == 2 * proxy.turnstile.max_handed_on


def test_the_next_turn_is_of_whoever_has_the_fewest_inside() -> None:
    proxy = Proxy()
    proxy.fill("greedy")
    others = [proxy.ask(f"other {number % 3}") for number in range(30)]
    for _ in range(60):
        proxy.complete_one()
    assert all(visit is not None and visit.has_begun for visit in others)


def test_turns_go_by_weight() -> None:
    proxy = Proxy()
    for flow, weight in (("heavy", 3.0), ("light", 1.0)):
        proxy.turnstile.flows.learn([(b"x-api-key", flow.encode())], flow, weight)
    for _ in range(600):
        proxy.ask("of heavy")
        proxy.ask("of light")
        if len(proxy.handed_on) > 80:
            proxy.complete_one()
    inside = Counter(visit.flow for visit in proxy.handed_on)
    assert 2.5 <= inside["of heavy"] / inside["of light"] <= 3.5


def test_where_no_keys_are_asked_for_whoever_comes_may_have_all() -> None:
    proxy = Proxy()
    proxy.turnstile.flows.learn([(b"x-api-key", b"any")], None)
    assert proxy.fill("from 10.0.0.1") == 256
    assert len(proxy.handed_on) == 96


def test_whoever_leaves_leaves_nothing_behind() -> None:
    proxy, drawn = Proxy(max_requests=40), random.Random(1)
    inside: list[Visit] = []
    for _ in range(4000):
        visit = proxy.ask(f"flow {drawn.randrange(6)}")
        if visit is not None:
            inside.append(visit)
        while inside and drawn.random() < 0.5:
            inside.pop(drawn.randrange(len(inside))).leave()
        assert proxy.turnstile.num_inside == len(inside) <= 40
    for visit in inside:
        visit.leave()
    assert proxy.turnstile.num_inside == 0
    assert not proxy.turnstile._presence.inside
    assert not proxy.turnstile._handed_on
    assert not proxy.turnstile._lines


def test_one_tenants_appointments_are_not_behind_anothers_and_follow_its_own_part_of_the_pace() -> None:
    proxy = Proxy()
    proxy.fill("greedy")
    for _ in range(40):
        assert proxy.ask("other") is not None
    told = [proxy.turnstile.refuse("greedy") for _ in range(400)]
    alone = Turnstile(TurnstileSettings(max_requests=256), clock=lambda: proxy.now)
    whole = [alone.refuse() for _ in range(400)]
    assert 1.1 * sum(whole) < sum(told) < 2 * sum(whole), "it had some three quarters of those inside"
    assert proxy.turnstile.refuse("other") <= 2


def test_no_more_books_of_appointments_are_kept_than_that() -> None:
    proxy = Proxy()
    for number in range(3 * MAX_BOOKS):
        proxy.turnstile.refuse(f"from {number}")
    assert len(proxy.turnstile._bookings) == MAX_BOOKS
