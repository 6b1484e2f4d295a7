"""Admission as a simulation: replicas serve at a pace, clients come as they like, and the clock is moved by hand."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from serve_app.core.errors import Overloaded, Unavailable
from serve_app.core.shares import Priority, Share
from serve_app.router.admission import Admission, AdmissionSettings, Reason, Room, Ticket
from serve_app.router.appointments import OBEYED_S

SLOTS, PLACES, SERVICE_S = 64, 2112, 0.8
CAPACITY = SLOTS / SERVICE_S
"""Requests per second that the simulated replicas serve at best: 80."""


@dataclass
class Service:
    """A batch of slots in front of a queue, in simulated time.

    begun: how long each request waited for a slot;  done: when each was complete;  refused: when, and Retry-After
    """

    settings: AdmissionSettings = field(default_factory=AdmissionSettings)
    service_s: float = SERVICE_S
    now: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    refused: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room = Room(num_slots=SLOTS, num_places=PLACES)
        self.admission = Admission(
            lambda: {"m": self.room}, self.settings, clock=lambda: self.now, jitter=random.Random(5).random
        )
        self.random = random.Random(7)
        self._order = itertools.count()
        self._ends: list[tuple[float, int, Ticket]] = []
        self._queue: list[tuple[float, Ticket]] = []

    @property
    def num_inside(self) -> int:
        return len(self._ends) + len(self._queue)

    def come(self, size: int = 1) -> float | None:
        """A client comes now; Retry-After where it is refused."""
        ticket = None
        try:
            ticket = self.admission.enter()
            ticket.grow({"m": size})
        except Overloaded as error:
            if ticket is not None:
                ticket.give_back()
            self.refused.append((self.now, error.retry_after_s or 0.0))
            return error.retry_after_s
        self._queue.append((self.now, ticket))
        self._begin()
        return None

    def pass_until(self, time: float) -> None:
        while self._ends and self._ends[0][0] <= time:
            self.now, _, ticket = heapq.heappop(self._ends)
            ticket.give_back({"m": 1})
            self.done.append(self.now)
            self._begin()
        self.now = time

    def _begin(self) -> None:
        while self._queue and len(self._ends) < self.room.num_slots:
            came_at, ticket = self._queue.pop(0)
            self.waits.append((came_at, self.now - came_at))
            ends_at = self.now + self.service_s * self.random.uniform(0.5, 1.5)
            heapq.heappush(self._ends, (ends_at, next(self._order), ticket))

    def goodput(self, begin: float, end: float) -> float:
        return sum(begin <= at < end for at in self.done) / (end - begin)


def overload(service: Service, rate: float, *, until: float) -> None:
    """An open loop: clients come at this rate and take no notice of anything."""
    while service.now < until:
        service.pass_until(service.now + service.random.expovariate(rate))
        service.come()


@pytest.mark.slow
def test_under_ten_times_the_load_goodput_stays_and_no_wait_grows_beyond_the_bound() -> None:
    service = Service()
    overload(service, 10 * CAPACITY, until=120)
    assert service.goodput(10, 120) >= 0.95 * CAPACITY
    assert max(wait for _, wait in service.waits) < 1.25 * service.settings.max_wait_s
    assert service.refused


@pytest.mark.slow
def test_goodput_does_not_swing_under_a_lasting_overload() -> None:
    service = Service()
    overload(service, 10 * CAPACITY, until=180)
    by_second = [service.goodput(second, second + 5) for second in range(20, 175, 5)]
    assert min(by_second) >= 0.9 * CAPACITY
    inside = [wait for came_at, wait in service.waits if came_at > 60]
    assert min(inside) > 0.7 * max(inside), "the queue stays as long as it is"


def test_the_measured_pace_bounds_the_wait_of_slow_requests_long_before_the_places_do() -> None:
    service = Service(service_s=20 * SERVICE_S)  # 4 per second: the places would last for nine minutes
    overload(service, 20.0, until=400)
    late = [wait for came_at, wait in service.waits if came_at > 200]
    assert max(late) < 1.5 * service.settings.max_wait_s
    assert service.admission.refusals[Reason.WAIT] > 0
    assert service.goodput(100, 400) >= 0.95 * CAPACITY / 20


@pytest.mark.slow
def test_after_an_overload_newcomers_are_let_in_as_soon_as_the_queue_is_served() -> None:
    service = Service()
    overload(service, 10 * CAPACITY, until=60)
    service.pass_until(62)
    assert service.come() is None, "what was served meanwhile makes room at once"
    service.pass_until(62 + 1.3 * service.settings.max_wait_s)
    assert service.num_inside == 0
    waited = len(service.waits)
    assert [service.come() for _ in range(SLOTS)] == [None] * SLOTS
    assert [wait for _, wait in service.waits[waited:]] == [0.0] * SLOTS


def test_a_service_that_stood_idle_takes_a_burst_in_and_keeps_the_pace_it_had() -> None:
    service = Service()
    overload(service, 2 * CAPACITY, until=60)
    service.pass_until(1000)
    pace = service.admission.predicted_waits_s["m"]
    assert pace == 0
    burst = [service.come() for _ in range(1800)]
    assert burst == [None] * 1800
    assert service.admission.predicted_waits_s["m"] == pytest.approx(1800 / CAPACITY, rel=0.2)


def test_before_anything_is_measured_all_places_are_given_away() -> None:
    service = Service()
    answers = [service.come() for _ in range(PLACES + 10)]
    assert answers[:PLACES] == [None] * PLACES
    assert all(answers[PLACES:])


@pytest.mark.slow
def test_clients_that_keep_their_appointments_are_seldom_refused_twice() -> None:
    service = Service()
    waiting: list[float] = [0.0] * 6000
    num_calls = 0
    while waiting:
        heapq.heapify(waiting)
        service.pass_until(max(service.now, heapq.heappop(waiting)))
        num_calls += 1
        retry_after_s = service.come()
        if retry_after_s is not None:
            heapq.heappush(waiting, service.now + retry_after_s)
    assert num_calls < 2.2 * 6000


def test_appointments_spread_and_stay_within_reason() -> None:
    service = Service()
    for _ in range(PLACES):
        service.come()
    told = [service.come() or 0.0 for _ in range(50_000)]
    assert told[0] <= 2
    assert sorted(told[:1000])[500] > 4, "a thousand refused at once come back over seconds"
    assert max(told) == OBEYED_S, "no client would wait for longer"
    assert len(set(told[-1000:])) > 5, "those who are told the longest are spread as well"


def test_a_request_counts_with_all_its_sequences_once_they_are_known() -> None:
    service = Service()
    assert service.come(size=PLACES - 1) is None
    assert service.come(size=2) is not None
    assert service.come(size=1) is None
    assert service.come(size=1) is not None
    assert service.admission.refusals == {Reason.PLACES: 2}


def test_a_full_model_does_not_close_the_door_to_another() -> None:
    rooms = {"a": Room(num_slots=1, num_places=1), "b": Room(num_slots=1, num_places=1)}
    admission = Admission(lambda: rooms, clock=lambda: 0.0)
    admission.enter().grow({"a": 1})
    second, third = admission.enter(), admission.enter
    with pytest.raises(Overloaded):
        second.grow({"a": 1})
    second.grow({"b": 1})
    with pytest.raises(Overloaded):
        third()


def test_requests_whose_body_is_read_have_their_places_already() -> None:
    admission = Admission(lambda: {"m": Room(num_slots=2, num_places=2)}, clock=lambda: 0.0)
    first, _ = admission.enter(), admission.enter()
    with pytest.raises(Overloaded):
        admission.enter()
    first.give_back()
    first.give_back()
    admission.enter()
    assert admission.num_open == 2


def test_the_number_of_open_requests_is_bounded_where_models_say_nothing() -> None:
    admission = Admission(dict, AdmissionSettings(max_open_requests=3))
    tickets = [admission.enter() for _ in range(3)]
    with pytest.raises(Overloaded):
        admission.enter()
    assert admission.refusals == {Reason.OPEN: 1}
    tickets[0].give_back()
    admission.enter().grow({"silent": 10_000})


def test_work_of_other_routers_takes_places_too() -> None:
    room = Room(num_slots=1, num_places=4, num_foreign=3)
    admission = Admission(lambda: {"m": room}, clock=lambda: 0.0)
    admission.enter().grow({"m": 1})
    with pytest.raises(Overloaded):
        admission.enter()


def test_stopping_ends_what_is_open_and_lets_nobody_in() -> None:
    admission = Admission(dict)
    ended: list[str] = []
    running, reading = admission.enter(), admission.enter()
    running.grow({"m": 1})
    running.ends_by(lambda error: ended.append(error.code))
    admission.stop(Unavailable("The server is being stopped; retry.", None, {"retry_after_s": 1}))
    assert ended == ["unavailable"]
    with pytest.raises(Unavailable, match="stopped"):
        reading.grow({"m": 1})
    with pytest.raises(Unavailable, match="stopped"):
        admission.enter()


def test_a_model_that_appears_while_requests_run_is_not_counted_out_by_them() -> None:
    rooms: dict[str, Room] = {}
    admission = Admission(lambda: rooms, clock=lambda: 0.0)
    early = admission.enter()
    early.grow({"m": 3})
    rooms["m"] = Room(num_slots=1, num_places=4)
    admission.enter().grow({"m": 2})
    early.give_back()
    assert admission.sequences == {"m": (2, 4)}


@pytest.mark.parametrize(("priority", "is_refused"), [("standard", False), ("interactive", False), ("batch", True)])
def test_only_who_is_of_the_class_batch_waits_behind_its_long_lines(priority: Priority, is_refused: bool) -> None:
    now = [0.0]
    admission = Admission(lambda: {"m": Room(num_slots=2, num_places=66)}, clock=lambda: now[0])
    for _ in range(2):
        admission.enter(Share(flow="acme", priority="batch")).grow({"m": 1})
    now[0] = 600.0
    admission.enter(Share(flow="acme", priority="batch")).give_back()  # since when nothing has come to an end
    with pytest.raises(Overloaded) if is_refused else contextlib.nullcontext():
        admission.enter(Share(flow="acme", priority=priority)).grow({"m": 1})
