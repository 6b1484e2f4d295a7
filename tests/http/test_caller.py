"""Who obeys Retry-After finds a place at the first retry, though others of its own tenant come again at once."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from serve_app.http.caller import MAX_EARLY, Caller
from serve_app.http.turnstile import Turnstile, TurnstileSettings
from serve_app.http.visits import Visit

PACE = 20.0
AT_ONCE_S = 0.003
NUM_OTHERS = 19
GREEDY = "of greedy"
PART = 0.6
"""Of its share that each other tenant asks for, where not all of them ask for nearly all of it."""


@dataclass(eq=False, slots=True)
class Client:
    """One connection. num_refused: in a row, at most 2 of which are told apart"""

    flow: str
    caller: Caller
    obeys: bool = True
    comes_again: bool = True
    num_refused: int = 0


@dataclass
class Service:
    """Closed loops of one tenant through a full proxy, and others that send now and then, in simulated time. It
    completes one after another at random times, by turns of tenants, as the engine does.

    starts_s: when the loops begin, those first that do not obey;  falls_to: part of its pace, from then on
    ended: how first retries of those who obey and of those who do not ended, once that has settled
    waits: seconds of the requests of other tenants;  done: of the loops, by whether they obey
    """

    num_loops: int
    rude: float
    seed: int = 1
    settled_s: float = 50.0
    part: float = PART
    starts_s: float = 0.0
    pace: float = PACE
    falls_to: float = 1.0
    now: float = 0.0
    ended: Counter[tuple[bool, str]] = field(default_factory=Counter)
    num_done: int = 0
    num_idle: int = 0
    waits: list[float] = field(default_factory=list)
    done: Counter[bool] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        random.seed(self.seed)  # of the appointments
        self._drawn = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._inside: list[tuple[Visit, Client, float]] = []
        self._served = Counter[str]()
        self.turnstile = Turnstile(TurnstileSettings(), clock=lambda: self.now)
        self.turnstile.flows.learn([(b"x-api-key", b"any")], "any")
        self._offered_per_s = self.part * self.pace / (NUM_OTHERS + 1)
        self._later(self.starts_s, self._fall)
        for number in range(self.num_loops):
            client = self._client(GREEDY, obeys=number >= self.rude * self.num_loops)
            later_s = number / self.num_loops if self.starts_s else self._drawn.random()
            self._later(self.starts_s + later_s, lambda client=client: self._ask(client))
        for number in range(NUM_OTHERS):
            self._send_later(f"of {number}")
        self._later(1.0, self._complete)

    def run(self, seconds: float) -> Service:
        while self._events[0][0] < seconds:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self

    def _fall(self) -> None:
        self.pace *= self.falls_to

    def _client(self, flow: str, **what: bool) -> Client:
        return Client(flow, Caller(self.turnstile), **what)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def _send_later(self, flow: str) -> None:
        def send() -> None:
            self._ask(self._client(flow, comes_again=False))
            self._send_later(flow)

        self._later(self._drawn.expovariate(self._offered_per_s), send)

    def _ask(self, client: Client) -> None:
        is_refused = client.caller.is_one_too_many(client.flow, self.now)
        if client.flow == GREEDY and client.num_refused == 1 and self.now > self.settled_s:
            self.ended[client.obeys, "refused" if is_refused else "answered"] += 1
        if not is_refused:
            is_due = client.caller.is_due
            client.caller.enter(client.flow, self.now)
            client.caller.please()
            client.num_refused = 0
            self._lift(client.flow)
            self._inside.append((self.turnstile.enter(lambda: None, client.flow, is_due=is_due), client, self.now))
            return
        client.num_refused += 1
        retry_after_s = client.caller.refuse(client.flow, self.now)
        again_s = max(AT_ONCE_S, client.caller.pause_s(self.now))
        if client.obeys:
            again_s = max(retry_after_s, again_s) + 0.01 * self._drawn.random()
        self._later(again_s, lambda: self._ask(client))

    def _lift(self, flow: str) -> None:
        """Nobody hoards service."""
        there = {each.flow for _, each, _ in self._inside}
        if there and flow not in there:
            self._served[flow] = max(self._served[flow], min(self._served[each] for each in there))

    def _complete(self) -> None:
        self._later(self._drawn.expovariate(self.pace), self._complete)
        begun = [each for each in self._inside if each[0].has_begun]
        if not begun:
            self.num_idle += 1
            return
        done = min(begun, key=lambda each: self._served[each[1].flow])
        visit, client, came_at = done
        self._inside.remove(done)
        self._served[client.flow] += 1
        visit.leave()
        self.num_done += 1
        if client.comes_again:
            self.done[client.obeys] += 1
            self._later(AT_ONCE_S, lambda: self._ask(client))
        else:
            self.waits.append(self.now - came_at)


@pytest.mark.slow
@pytest.mark.parametrize("rude", [0.0, 0.5, 0.9])
def test_whoever_obeys_is_let_in_at_the_first_retry_beside_rude_ones_of_its_tenant(rude: float) -> None:
    found = [Service(400, rude, seed).run(120) for seed in (1, 2)]
    ended = sum((each.ended for each in found), Counter[tuple[bool, str]]())
    assert ended[True, "answered"] >= 100 * (1 - rude)
    assert ended[True, "answered"] >= 0.95 * (ended[True, "answered"] + ended[True, "refused"])
    assert ended[False, "answered"] <= 0.05 * (ended[False, "answered"] + ended[False, "refused"]) or not rude
    for each in found:
        assert each.num_idle == 0
        assert each.num_done >= 0.9 * 119 * PACE
        assert sorted(each.waits)[len(each.waits) * 95 // 100] < 2.0, "other tenants do not wait behind it"


@pytest.mark.slow
def test_whoever_obeys_is_let_in_where_other_tenants_take_all_but_a_little() -> None:
    """Two a second are left of twenty, for which 360 ask in a loop and 40 when they were told to."""
    found = [Service(400, 0.9, seed, settled_s=100, part=0.95).run(300) for seed in (1, 2, 3)]
    ended = sum((each.ended for each in found), Counter[tuple[bool, str]]())
    assert ended[True, "answered"] >= 100
    assert ended[True, "answered"] >= 0.95 * (ended[True, "answered"] + ended[True, "refused"])
    assert all(each.num_idle == 0 for each in found)


@pytest.mark.slow
def test_a_crowd_among_others_that_were_there_is_told_times_at_which_there_is_a_place() -> None:
    """At its first instant a tenant is alone in the proxy, and yet what is left of the machine is what others leave: a
    tenth of 47 a second.
    """
    crowd = {"settled_s": 40, "starts_s": 40, "part": 0.95, "pace": 47.0}
    found = [Service(300, 0.25, seed, **crowd).run(100) for seed in (1, 2, 3)]
    ended = sum((each.ended for each in found), Counter[tuple[bool, str]]())
    assert ended[True, "answered"] >= 200
    assert ended[True, "answered"] >= 0.95 * (ended[True, "answered"] + ended[True, "refused"])


@pytest.mark.slow
def test_whoever_obeys_has_most_of_the_turns_where_the_pace_has_fallen_to_less_than_others_ask_for() -> None:
    """Those who asked first do not obey, and have all places, for longer than anybody may be told to stay away. When
    these are done nearly all turns are of those who came when they were told to.
    """
    fallen = {"settled_s": 40, "starts_s": 40, "part": 0.95, "pace": 10.0, "falls_to": 0.9}
    for seed in (1, 2):
        found = Service(400, 0.5, seed, **fallen).run(200)
        assert found.ended[True, "answered"] >= 40
        before = found.done.copy()
        assert before[True] >= 10
        found.run(300)
        assert found.done[True] - before[True] >= 2 * (found.done[False] - before[False])


def test_whoever_asks_in_a_loop_is_not_awaited_until_it_has_obeyed_once() -> None:
    now = 100.5
    turnstile = Turnstile(TurnstileSettings(max_requests=4), clock=lambda: now)
    inside = [turnstile.enter(lambda: None) for _ in range(4)]
    rude, other = Caller(turnstile), Caller(turnstile)
    seconds = max(each.refuse("", now) for each in (rude, other))
    for _ in range(MAX_EARLY):
        rude.refuse("", now)
    now += seconds
    assert turnstile._num_due("") == 1, "the other one"
    assert rude.is_one_too_many("", now)
    assert not rude.is_due
    inside.pop().leave()
    assert rude.is_one_too_many("", now), "a place that is kept for the other one"
    assert not other.is_one_too_many("", now)
    assert other.is_due
    other.enter("", now)
    inside.append(turnstile.enter(lambda: None, is_due=True))
    now += rude.refuse("", now)
    assert turnstile._num_due("") == 0, "it was told a time, but nobody waits for it"
    assert rude.is_one_too_many("", now)
    now += rude.refuse("", now)
    assert turnstile._num_due("") == 1, "it obeyed"


def test_a_place_that_was_given_early_is_not_kept_for_later() -> None:
    now = 100.5
    turnstile = Turnstile(TurnstileSettings(max_requests=4), clock=lambda: now)
    inside = [turnstile.enter(lambda: None) for _ in range(4)]
    early, told = Caller(turnstile), Caller(turnstile)
    assert early.is_one_too_many("", now)
    assert told.is_one_too_many("", now)
    seconds = [each.refuse("", now) for each in (early, told)]
    inside.pop().leave()
    assert not early.is_one_too_many("", now)
    early.enter("", now)
    now += max(seconds)
    assert turnstile._num_due("") == 1, "only one is still to come"
    assert not told.is_one_too_many("", now)
    assert told.is_due


def test_whom_the_application_sent_away_takes_nobodys_place() -> None:
    now = 100.5
    turnstile = Turnstile(TurnstileSettings(max_requests=4), clock=lambda: now)
    sent_away, told = Caller(turnstile), Caller(turnstile)
    sent_away.enter("", now)
    seconds = told.refuse("", now)
    sent_away.send_away(seconds, now)
    sent_away.enter("", now + 0.1)
    now += seconds
    assert turnstile._num_due("") == 1
    assert not sent_away.is_one_too_many("", now)
    assert (sent_away.is_due, turnstile._num_due("")) == (False, 1)
