"""A newcomer does not wait for a place that others hold for long: who gives one, when, and what that costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from serve_app.core.shares import Priority, Share
from serve_app.engine.config import SPARE_PART
from serve_app.engine.scheduler import policy as policy_module
from serve_app.engine.scheduler.policy import AT_ONCE, PAID, FairShares, Rules
from serve_app.engine.scheduler.sequence import Sequence
from tests.engine.simulated import Simulation

LONG, SHORT = Share(flow="long"), Share(flow="short")
PLACES = 16


def steps_until_first_token(simulation: Simulation, asked: Sequence) -> int:
    before, story = simulation.num_steps, simulation.stories[asked.request.request_id]
    while story.first_at is None:
        simulation.step()
        simulation.scheduler.check_integrity()
    return simulation.num_steps - before


@pytest.mark.law("Places")
@pytest.mark.parametrize("num_long", [PLACES, 3 * PLACES])
def test_a_short_question_beside_a_long_job_waits_a_quantum_and_not_for_the_job(num_long: int) -> None:
    waits = {}
    for is_cached in (True, False):
        simulation = Simulation(num_places=PLACES, has_spare=False, prefix_cache=is_cached)
        for _ in range(num_long):
            simulation.ask(LONG, 50, 400)
        simulation.run(30)
        asked = simulation.ask(SHORT, 20, 10)
        waits[is_cached] = steps_until_first_token(simulation, asked)
        simulation.drain()
        assert all(story.ended_at is not None for story in simulation.stories.values())
    quantum_in_steps = Rules().quantum / (Rules().decode_weight * PLACES)
    assert waits[True] <= quantum_in_steps + 3
    assert waits[False] > 300, "where nothing is cached nobody is sent away, as all would be computed again"


@pytest.mark.parametrize("priority", ["standard", "interactive"])
def test_who_has_less_than_its_share_takes_a_spare_place_and_nobody_loses_one(priority: Priority) -> None:
    simulation = Simulation(num_places=PLACES)
    for _ in range(3 * PLACES):
        simulation.ask(LONG, 50, 400)
    simulation.run(30)
    assert len(simulation.scheduler.running) == PLACES, "of one flow none takes more than all can"
    asker = replace(SHORT, priority=priority)
    for number in range(PLACES // SPARE_PART):
        assert steps_until_first_token(simulation, simulation.ask(asker, 20, 300)) <= 2
        assert len(simulation.scheduler.running) == PLACES + number + 1
    assert simulation.scheduler.num_preemptions == 0
    simulation.ask(asker, 20, 10)
    simulation.run(30)
    assert len(simulation.scheduler.running) == PLACES + PLACES // SPARE_PART
    simulation.drain()
    assert all(story.ended_at is not None for story in simulation.stories.values())


def test_spare_places_go_to_no_lower_class_and_to_nobody_who_has_as_many_as_others() -> None:
    for share in (replace(SHORT, priority="batch"), replace(SHORT, weight=0.01)):
        simulation = Simulation(num_places=PLACES)
        for _ in range(PLACES):
            simulation.ask(LONG, 50, 400)
        simulation.run(5)
        simulation.ask(share, 20, 10)
        simulation.run(20)
        assert len(simulation.scheduler.running) == PLACES


def test_who_asks_now_and_then_does_not_wait_for_the_turn_of_who_asks_all_the_time() -> None:
    """Sixteen tokens each, so that those of the greedy flow begin and end together."""
    drawn, simulation = random.Random(1), Simulation(num_places=32, prefix_cache=True)
    greedy, waits = list[Sequence](), list[int]()
    asked = dict[str, int]()
    for step in range(1500):
        greedy = [each for each in greedy if not each.is_finished]
        greedy += [simulation.ask(LONG, 8, 16) for _ in range(42 - len(greedy))]
        if drawn.random() < 0.3:
            asked[simulation.ask(Share(flow=f"f{drawn.randrange(19)}"), 8, 16).request.request_id] = step
        simulation.step()
        for name in [name for name in asked if simulation.stories[name].first_at is not None]:
            waits.append(step + 1 - asked.pop(name))
    waits.sort()
    assert waits[len(waits) // 2] <= 2
    assert waits[len(waits) * 95 // 100] <= 4


def test_who_gave_its_place_goes_on_where_it_was() -> None:
    simulation = Simulation(num_places=2, prefix_cache=True)
    job = [simulation.ask(LONG, 40, 300) for _ in range(2)]
    simulation.run(100)
    num_before = simulation.num_tokens
    steps_until_first_token(simulation, simulation.ask(SHORT, 20, 4))
    assert sum(each.place.holding is None for each in job) == simulation.scheduler.num_preemptions == 1
    simulation.drain()
    assert [each.num_generated for each in job] == [300, 300]
    computed_twice = simulation.num_tokens - num_before - (2 * 300 - 2 * 98) - 20 - 4
    assert computed_twice <= simulation.store.block_size


@pytest.mark.law("Places")
@pytest.mark.parametrize("seed", range(3))
def test_a_flow_gives_a_few_places_and_one_for_each_quantum_of_its_own_and_little_is_computed_twice(seed: int) -> None:
    """Flows of all classes and weights, short and long, who come and go: no more is given than was had."""
    drawn = random.Random(seed)
    simulation = Simulation(num_places=8, num_blocks=4000, prefix_cache=True, rules=Rules(age_s=1.0, max_wait_s=5.0))
    given = dict[str, int]()
    note_given = simulation.policy.note_given

    def noted(flow: str) -> None:
        given[flow] = given.get(flow, 0) + 1
        note_given(flow)

    simulation.policy.note_given = noted  # type: ignore[method-assign]
    shares = [
        Share(flow=f"f{each}", weight=1 + each % 3, priority=("interactive", "standard", "batch")[each % 3])
        for each in range(7)
    ]
    asked, needed = [], 0
    for _ in range(3000):
        if drawn.random() < 0.15 and len(simulation.waiting) < 40:
            length, max_tokens = drawn.choice([(20, 8), (60, 200), (200, 30)])
            asked.append(simulation.ask(drawn.choice(shares), length, max_tokens))
            needed += length + max_tokens - 1
        simulation.step()
        for flow, number in given.items():
            of_its_own = (number - AT_ONCE) * simulation.rules.quantum
            assert of_its_own <= simulation.service_of(flow)
    simulation.drain()
    assert all(each.is_finished for each in asked)
    assert sum(given.values()) >= 10
    assert simulation.scheduler.num_preemptions == sum(given.values()), "no place was lost for want of blocks"
    assert simulation.num_tokens - needed <= sum(given.values()) * simulation.store.block_size


def test_places_that_are_given_cost_no_more_steps_than_first_come_first_served() -> None:
    """The same requests in five flows and in one."""

    def drained(*, flows: int) -> Simulation:
        drawn = random.Random(5)
        simulation = Simulation(num_places=12, num_blocks=3000, prefix_cache=True)
        for number in range(400):
            shape = drawn.choice([(20, 8), (30, 250), (300, 40)])
            simulation.ask(Share(flow=f"f{number * number % flows}"), *shape)
            simulation.run(drawn.randrange(3))
        simulation.drain()
        return simulation

    fair, reference = drained(flows=5), drained(flows=1)
    assert (fair.scheduler.num_preemptions > 0, reference.scheduler.num_preemptions) == (True, 0)
    assert fair.num_steps <= reference.num_steps / 0.97
    assert fair.now <= reference.now / 0.97


def test_two_long_jobs_on_one_place_take_turns_and_those_last() -> None:
    simulation = Simulation(num_places=1, prefix_cache=True)
    jobs = [simulation.ask(Share(flow=flow), 20, 600) for flow in "ab"]
    simulation.drain()
    assert all(each.is_finished for each in jobs)
    num_turns = 1 + simulation.scheduler.num_preemptions
    assert 4 <= num_turns <= 2 * 600 * simulation.rules.decode_weight / simulation.rules.quantum


@pytest.mark.parametrize(("num_flows", "num_places", "num_jobs"), [(3, 1, 3), (8, 4, 16)])
@pytest.mark.parametrize("num_kept", [1.5, 1.75, 2.0])
def test_contexts_that_do_not_fit_the_cache_together_are_not_computed_again_and_again(
    num_flows: int, num_places: int, num_jobs: int, num_kept: float
) -> None:
    """num_kept: contexts that the cache has room for, for each place"""
    prompt, completion = 1000, 300

    def asked(*, flows: int) -> tuple[Simulation, list[Sequence]]:
        num_blocks = int(num_kept * num_places * (prompt + completion)) // 16
        simulation = Simulation(num_places=num_places, num_blocks=num_blocks, prefix_cache=True)
        return simulation, [
            simulation.ask(Share(flow=f"f{number % flows}"), prompt, completion) for number in range(num_jobs)
        ]

    reference, _ = asked(flows=1)
    reference.drain()
    simulation, jobs = asked(flows=num_flows)
    for _ in range(int(1.25 * reference.num_steps)):
        simulation.step()
    assert all(each.is_finished for each in jobs)
    assert simulation.num_tokens <= 2 * reference.num_tokens


@pytest.fixture
def places() -> FairShares:
    policy = FairShares(Rules(quantum=100.0))
    policy.charge(LONG, 500.0)
    policy.charge(SHORT, 350.0)
    return policy


def giver(places: FairShares, running: list[Share], claimant: Share, **debts: float) -> int | None:
    """debts: of each of a flow's places"""
    owed = [debts.get(share.flow, 0.0) for share in running]
    return places.giver(running, owed, claimant, resumes=lambda place: place != 3)


def test_the_youngest_that_can_go_on_gives_its_place(places: FairShares) -> None:
    assert giver(places, [LONG, LONG, LONG, LONG], SHORT) == 2


@pytest.mark.parametrize("debt", [51.0, 500.0])
def test_who_is_not_a_quantum_above_gives_nothing_debts_counted(places: FairShares, debt: float) -> None:
    assert giver(places, [SHORT, *[LONG] * 4], SHORT, short=debt) is None
    assert giver(places, [SHORT, LONG, LONG], SHORT, short=debt, long=debt - 50) is None, "without its own"
    assert giver(places, [SHORT, LONG, LONG], SHORT, short=debt, long=debt - 49) == 2


def test_nobody_gives_who_would_have_fewer_places_for_its_weight(places: FairShares) -> None:
    assert giver(places, [LONG, SHORT], SHORT) is None
    assert giver(places, [LONG, LONG, SHORT], SHORT) == 1
    assert giver(places, [LONG, SHORT, SHORT], Share(flow="short", weight=3.0)) == 0


def test_a_flow_gives_the_place_of_its_lower_class_to_its_higher_one_and_never_back(places: FairShares) -> None:
    batch = Share(flow="long", priority="batch")
    assert giver(places, [batch, batch, LONG], LONG) == 1
    assert giver(places, [LONG, LONG], batch) is None


def test_a_flow_gives_nothing_to_itself_and_after_a_few_pays_for_each(places: FairShares) -> None:
    assert giver(places, [LONG, LONG], LONG) is None
    for _ in range(AT_ONCE):
        assert giver(places, [LONG, LONG], SHORT) == 1
        places.note_given("long")
    assert giver(places, [LONG, LONG], SHORT) is None
    places.charge(LONG, 100.0)
    assert giver(places, [LONG, LONG], SHORT) == 1
    places.note_recomputed("long", 10)
    assert giver(places, [LONG, LONG], SHORT) is None
    places.charge(LONG, 10 * PAID)
    assert giver(places, [LONG, LONG], SHORT) == 1


def test_a_lower_class_gives_before_a_greedier_flow_and_a_higher_one_never(places: FairShares) -> None:
    batch, now = Share(flow="batch", priority="batch"), Share(flow="now", priority="interactive")
    places.charge(batch, 120.0)
    places.charge(now, 9000.0)
    assert giver(places, [batch, LONG, now], SHORT) == 0
    assert giver(places, [now, now], SHORT) is None


def test_what_is_known_of_flows_that_gave_is_bounded(places: FairShares) -> None:
    for number in range(3 * policy_module.MAX_GIVERS):
        share = Share(flow=f"f{number}")
        places.charge(share, 500.0)
        places.note_given(share.flow)
        places.charge(share, 500.0)
    assert len(places._budgets) <= policy_module.MAX_GIVERS
    for number in range(3 * policy_module.MAX_GIVERS):
        places.note_given(f"gone{number}")
    assert len(places._budgets) <= policy_module.MAX_GIVERS


@pytest.mark.parametrize("served_before", [0.0, 1000.0])
def test_a_crowd_that_came_first_leaves_places_at_once_to_many_who_come_behind_it(served_before: float) -> None:
    """Before it is charged for what it has begun: it owes that."""
    simulation = Simulation(num_places=32, prefix_cache=True)
    others = [Share(flow=f"f{number}") for number in range(15)]
    for share in others:
        simulation.policy.charge(share, served_before)
    for _ in range(300):
        simulation.ask(LONG, 8, 64)
    simulation.run(3)
    assert len(simulation.scheduler.running) == 32
    asked = [simulation.ask(share, 8, 16).request.request_id for share in others]
    simulation.run(16)
    assert all(simulation.stories[name].first_at is not None for name in asked)
