"""Admission beside a greedy tenant, as a simulation: replicas serve flows alike, clients obey or do not."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from serve_app.core.errors import Overloaded
from serve_app.core.shares import Share
from serve_app.router.admission import MAX_BOOKS, Admission, AdmissionSettings, Room
from serve_app.router.appointments import MAX_RETRY_S
from serve_app.router.turns import LATELY_S, Active

SLOTS, PLACES, SERVICE_S = 16, 256, 0.4
CAPACITY = SLOTS / SERVICE_S
"""Requests per second: 40."""
OTHERS = [f"t{number}" for number in range(1, 20)]
SECONDS = 60.0
USED = 0.7
"""Of its share, by each of the nineteen."""


@dataclass
class Town:
    """Slots that are given to flows in turn, each for so long; time goes on by events.

    refused, came_again: of the others, at first and after they had waited as told;  waits: of theirs, for a slot
    """

    now: float = 0.0
    refused: int = 0
    came_again: int = 0
    succeeded: int = 0
    asked: int = 0
    waits: list[float] = field(default_factory=list)
    retry_after: list[float] = field(default_factory=list)
    most_inside: int = 0

    def __post_init__(self) -> None:
        room = Room(num_slots=SLOTS, num_places=PLACES)
        self.admission = Admission(lambda: {"m": room}, clock=lambda: self.now, jitter=random.Random(1).random)
        self._queues: dict[str, deque[tuple[float, object]]] = {}
        self._turns: deque[str] = deque()
        self._num_busy = 0
        self._events: list[tuple[float, int, str, object]] = []
        self._number = 0
        self.refusals: Counter[str] = Counter()

    def at(self, time: float, what: str, about: object) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, what, about))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what, about = heapq.heappop(self._events)
            if what == "end":
                about.give_back({"m": 1})  # type: ignore[attr-defined]
                self._num_busy -= 1
                self._begin()
            else:
                self._come(str(about), is_again=what == "again")

    def _come(self, flow: str, *, is_again: bool) -> None:
        self.asked += flow != "greedy" and not is_again
        self.came_again += flow != "greedy" and is_again
        ticket = None
        try:
            ticket = self.admission.enter(Share(flow=flow))
            ticket.grow({"m": 1})
        except Overloaded as error:
            if ticket is not None:
                ticket.give_back()
            self.refusals[flow] += 1
            self.retry_after.append(error.retry_after_s or 0.0)
            if flow != "greedy" and not is_again:
                self.refused += 1
                self.at(self.now + (error.retry_after_s or 0.0), "again", flow)
            return
        self.succeeded += is_again
        if flow not in self._queues:
            self._queues[flow] = deque()
            self._turns.append(flow)
        self._queues[flow].append((self.now, ticket))
        self.most_inside = max(self.most_inside, self.admission.num_open)
        self._begin()

    def _begin(self) -> None:
        while self._num_busy < SLOTS and self._turns:
            flow = self._turns.popleft()
            came_at, ticket = self._queues[flow].popleft()
            if self._queues[flow]:
                self._turns.append(flow)
            else:
                del self._queues[flow]
            self._num_busy += 1
            if flow != "greedy":
                self.waits.append(self.now - came_at)
            self.at(self.now + SERVICE_S, "end", ticket)


def crowd(town: Town, *, is_greedy: bool) -> None:
    """Ten times what can be served, nearly all of it one tenant's, who comes again at once whatever it is told."""
    each = USED * CAPACITY / (len(OTHERS) + 1)
    rates = dict.fromkeys(OTHERS, each) | {"greedy": (10 * CAPACITY - each * len(OTHERS)) if is_greedy else 0.0}
    for flow, per_s in rates.items():
        drawn, now = random.Random(flow), 0.0
        while per_s and (now := now + drawn.expovariate(per_s)) < SECONDS:
            town.at(now, "come", flow)
    town.run(SECONDS + 30)


@pytest.mark.law("Room for all")
def test_a_greedy_tenant_at_ten_times_the_capacity_has_few_of_the_others_refused_and_their_retries_let_in() -> None:
    town = Town()
    crowd(town, is_greedy=True)
    assert town.asked > 1500
    assert town.refused <= 0.02 * town.asked
    assert town.succeeded >= 0.95 * town.came_again
    assert town.refusals["greedy"] > 15_000
    assert min(town.retry_after) >= 1
    assert town.most_inside <= PLACES
    assert sorted(town.waits)[len(town.waits) * 95 // 100] < 2 * SERVICE_S, "they wait for a turn, not for the greedy"
    assert town.admission.num_open == 0


def test_without_the_greedy_one_nobody_is_refused() -> None:
    town = Town()
    crowd(town, is_greedy=False)
    assert (town.refused, sum(town.refusals.values())) == (0, 0)


def test_who_is_alone_may_take_every_place_and_beside_another_an_eighth_is_left() -> None:
    admission = Admission(lambda: {"m": Room(num_slots=16, num_places=64)}, clock=lambda: 0.0)
    greedy, other = Share(flow="greedy"), Share(flow="other")

    def come(share: Share) -> bool:
        try:
            admission.enter(share).grow({"m": 1})
        except Overloaded:
            return False
        return True

    assert sum(come(greedy) for _ in range(40)) == 40
    assert come(other)
    assert sum(come(greedy) for _ in range(100)) == 64 - 8 - 41
    assert sum(come(other) for _ in range(100)) == 8
    assert not come(greedy)


def test_a_book_of_appointments_is_a_flows_own_and_there_are_so_many() -> None:
    room, settings = Room(num_slots=1, num_places=1), AdmissionSettings(max_wait_s=1.0)
    admission = Admission(lambda: {"m": room}, settings, clock=lambda: 0.0, jitter=lambda: 0.0)
    admission.enter(Share(flow="inside")).grow({"m": 1})

    def told(flow: str) -> float:
        with pytest.raises(Overloaded) as refused:
            admission.enter(Share(flow=flow))
        return refused.value.retry_after_s or 0.0

    greedy = [told("greedy") for _ in range(50)]
    assert greedy == sorted(greedy)
    assert greedy[-1] == MAX_RETRY_S
    assert told("other") < 2 * 3, "its share of the pace, and not behind the fifty"
    assert told("other") < greedy[-1] / 2
    for number in range(2 * MAX_BOOKS):
        told(f"f{number}")
    assert len(admission._gates["m"].appointments) == MAX_BOOKS


def test_parts_are_those_of_weights_among_those_who_asked_lately() -> None:
    now = 0.0
    active = Active(lambda: now)
    assert active.part_of("a") == 1.0
    for flow, weight in (("a", 1.0), ("b", 3.0)):
        active.note(Share(flow=flow, weight=weight))
    assert (active.part_of("a"), active.part_of("b"), active.part_of("c")) == (0.25, 0.75, 1.0)
    now = LATELY_S + 1
    active.note(Share(flow="c"))
    assert (len(active), active.part_of("c")) == (1, 1.0)


@pytest.mark.parametrize("num_idle", [1, 20])
def test_who_takes_what_idle_tenants_leave_comes_again_as_if_it_were_alone(num_idle: int) -> None:
    def last_told(num_idle: int) -> float:
        town = Town()
        town.admission = Admission(
            lambda: {"m": Room(num_slots=16, num_places=80)}, clock=lambda: town.now, jitter=lambda: 0.0
        )
        for number in range(num_idle):
            ticket = town.admission.enter(Share(flow=f"idle {number}"))
            ticket.grow({"m": 1})
            ticket.give_back({"m": 1})
        town.now = LATELY_S / 2
        for _ in range(200):
            town._come("greedy", is_again=False)
        return town.retry_after[-1]

    assert last_told(num_idle) <= 1.25 * last_told(0)


def test_no_slot_is_kept_empty_where_nothing_may_wait() -> None:
    admission = Admission(lambda: {"m": Room(num_slots=32, num_places=32)}, clock=lambda: 0.0)
    ticket = admission.enter(Share(flow="idle"))
    ticket.grow({"m": 1})
    ticket.give_back({"m": 1})
    for _ in range(32):
        admission.enter(Share(flow="busy")).grow({"m": 1})
    with pytest.raises(Overloaded):
        admission.enter(Share(flow="busy"))
