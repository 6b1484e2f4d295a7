"""Flows that share an engine: the real scheduler on simulated steps, at every one of which the bounds hold."""

from __future__ import annotations

import random

import pytest

from serve_app.core.shares import Share
from serve_app.engine.scheduler.planner import MOST_WITHOUT
from serve_app.engine.scheduler.policy import FairShares, Rules
from serve_app.engine.scheduler.sequence import Batch
from tests.engine.simulated import FirstCome, Simulation

A, B = Share(flow="a"), Share(flow="b")
LONGEST_PROMPT = 1000


def keep_backlogged(simulation: Simulation, share: Share, prompt_length: int, max_tokens: int) -> None:
    while simulation.num_waiting(share.flow) < 20:
        simulation.ask(share, prompt_length, max_tokens)


def bound_of(simulation: Simulation, *, longest_prompt: int) -> float:
    """2 · max(w_in · L, w_out · M); M is what fits a running batch."""
    rules = simulation.rules
    return 2 * max(rules.prefill_weight * longest_prompt, rules.decode_weight * simulation.num_blocks * 16)


@pytest.mark.law("Shares")
@pytest.mark.parametrize("shapes", [((8, 200), (LONGEST_PROMPT, 4)), ((500, 50), (500, 50)), ((4, 4), (300, 300))])
def test_backlogged_flows_of_any_shapes_are_served_alike_at_every_step(
    shapes: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    simulation = Simulation(num_places=16, num_blocks=192)
    bound = bound_of(simulation, longest_prompt=LONGEST_PROMPT)
    gaps = []
    for _ in range(2000):
        for share, shape in zip((A, B), shapes, strict=True):
            keep_backlogged(simulation, share, *shape)
        simulation.step()
        gaps.append(abs(simulation.served.get("a", 0.0) - simulation.served.get("b", 0.0)))
    assert max(gaps) <= bound
    assert max(gaps) <= bound / 1.5, "not only just"
    assert min(simulation.served.values()) > 3 * bound, "long enough to tell"


@pytest.mark.law("Shares")
def test_three_times_the_weight_is_three_times_the_service() -> None:
    simulation = Simulation(num_places=16)
    heavy = Share(flow="heavy", weight=3.0)
    for _ in range(3000):
        keep_backlogged(simulation, heavy, 20, 60)
        keep_backlogged(simulation, A, 200, 15)
        simulation.step()
    assert simulation.served["heavy"] / simulation.served["a"] == pytest.approx(3.0, rel=0.05)


@pytest.mark.law("Shares")
def test_a_flow_that_asked_for_nothing_is_owed_nothing() -> None:
    simulation = Simulation(num_places=16, num_blocks=320)
    bound = bound_of(simulation, longest_prompt=50)
    for _ in range(3000):
        keep_backlogged(simulation, A, 50, 50)
        simulation.step()
    before = dict(simulation.served)
    assert before["a"] > 5 * bound
    for _ in range(1000):
        keep_backlogged(simulation, A, 50, 50)
        keep_backlogged(simulation, B, 50, 50)
        simulation.step()
        gained = [simulation.served.get(flow, 0.0) - before.get(flow, 0.0) for flow in ("a", "b")]
        assert abs(gained[0] - gained[1]) <= bound


def test_a_flow_that_used_little_of_its_share_makes_up_for_nothing() -> None:
    """It runs one request at a time for long, and then wants all that there is."""
    simulation = Simulation(num_places=16, num_blocks=320)
    bound = bound_of(simulation, longest_prompt=50)
    for number in range(3000):
        keep_backlogged(simulation, A, 50, 50)
        if number % 60 == 0:
            simulation.ask(B, 10, 10)
        simulation.step()
    before = dict(simulation.served)
    assert before["a"] - before["b"] > 5 * bound
    for _ in range(1000):
        keep_backlogged(simulation, A, 50, 50)
        keep_backlogged(simulation, B, 50, 50)
        simulation.step()
    gained = [simulation.served[flow] - before[flow] for flow in ("a", "b")]
    assert abs(gained[0] - gained[1]) <= bound


def test_who_hops_between_adapters_cannot_push_one_that_stays_below_its_share() -> None:
    simulation = Simulation(num_places=8, num_slots=2, num_blocks=640, max_bypass_s=1.0)
    bound = bound_of(simulation, longest_prompt=64)
    resident, hopper = Share(flow="resident"), Share(flow="hopper")
    number = 0
    for _ in range(4000):
        while simulation.num_waiting("resident") < 20:
            simulation.ask(resident, 64, 30, adapter="stays")
        while simulation.num_waiting("hopper") < 20:
            number += 1
            simulation.ask(hopper, 64, 30, adapter=f"hop{number}")
        simulation.step()
        served = simulation.served
        assert served.get("hopper", 0.0) - served.get("resident", 0.0) <= bound
    usage = {each.flow: each for each in simulation.accounts.report().flows}
    assert usage["hopper"].num_swaps > 50
    assert usage["resident"].service == pytest.approx(usage["hopper"].service, rel=0.05), "swaps are paid by who hops"
    assert simulation.served["resident"] > simulation.served["hopper"]


def test_a_quantum_keeps_adapters_longer_where_not_all_have_a_slot() -> None:
    """Two flows with an adapter each, and one slot: turns that last save most of the swaps."""

    def swaps(quantum: float) -> int:
        simulation = Simulation(num_places=2, num_slots=1, rules=Rules(quantum=quantum, swap_weight=0.0))
        for _ in range(4000):
            for share in (A, B):
                while simulation.num_waiting(share.flow) < 4:
                    simulation.ask(share, 20, 10, adapter=share.flow)
            simulation.step()
        assert simulation.served["a"] == pytest.approx(simulation.served["b"], rel=0.05)
        return simulation.slots.num_loads

    assert swaps(quantum=1000.0) < swaps(quantum=0.0) / 4


@pytest.mark.law("Shares")
@pytest.mark.parametrize("seconds", [5.0, 2.0])
def test_classes_go_before_each_other_and_age_bounds_the_wait(seconds: float) -> None:
    simulation = Simulation(num_places=4, rules=Rules(age_s=seconds, quantum=0.0))
    now, later = Share(flow="now", priority="interactive"), Share(flow="later", priority="batch")
    for _ in range(100):
        keep_backlogged(simulation, now, 20, 20)
        simulation.step()
    begun_at, waits = simulation.now, []
    mine = simulation.ask(later, 20, 20)
    while len(waits) < 5:
        keep_backlogged(simulation, now, 20, 20)
        simulation.step()
        if mine.place.started_at is not None:
            waits.append(mine.place.started_at - begun_at)
            begun_at, mine = simulation.now, simulation.ask(later, 20, 20)
    a_place_is_free_s = 25 * simulation.prices.step_s * 2
    assert all(2 * seconds <= wait <= 2 * seconds + a_place_is_free_s for wait in waits)


def test_batches_sit_out_while_a_prompt_of_a_higher_class_is_computed_and_some_steps_at_most() -> None:
    simulation = Simulation(num_places=4)
    now, later = Share(flow="one"), Share(flow="one", priority="batch")
    kept = [simulation.ask(later, 20, 10_000) for _ in range(2)]
    simulation.run(4)
    simulation.ask(now, 250, 1)
    assert {span.sequence.request.share for span in simulation.step().spans} == {now}
    assert len(simulation.step().spans) == 2, "as soon as no prompt is left"

    before = [each.num_generated for each in kept]
    for _ in range(10 * (MOST_WITHOUT + 1)):
        simulation.ask(now, 250, 1)
        simulation.step()
    assert [each.num_generated - old for each, old in zip(kept, before, strict=True)] == [10, 10]


def test_who_had_no_turn_for_the_longest_wait_is_next_though_new_flows_come_for_ever() -> None:
    simulation = Simulation(num_places=2, rules=Rules(max_wait_s=3.0, quantum=0.0))
    simulation.policy.charge(A, 1e9)
    for number in range(4):
        simulation.ask(Share(flow=f"first{number}"), 20, 20)
    mine = simulation.ask(A, 20, 20)
    number = 0
    while mine.place.started_at is None:
        number += 1
        simulation.ask(Share(flow=f"new{number}"), 20, 20)
        simulation.step()
        assert simulation.now < 4.0
    assert mine.place.started_at > 3.0


def test_blocks_are_taken_back_from_who_is_furthest_above_its_share() -> None:
    """Not from who came last."""
    simulation = Simulation(num_places=8, num_blocks=60, rules=Rules(quantum=32.0))
    greedy = [simulation.ask(Share(flow="greedy"), 16, 300) for _ in range(6)]
    simulation.run(20)
    frugal = [simulation.ask(Share(flow=f"frugal{number}"), 16, 150) for number in range(2)]
    while simulation.scheduler.has_work:
        simulation.step()
        assert all(each not in frugal for each in simulation.waiting if each.place.started_at is not None)
    assert simulation.scheduler.num_preemptions > 0
    assert all(each.is_finished for each in (*frugal, *greedy))


def test_a_lower_class_gives_way_before_a_greedier_flow_of_a_higher_one() -> None:
    simulation = Simulation()
    simulation.policy.charge(A, 1e6)
    batch = Share(flow="b", priority="batch")
    assert simulation.policy.victim([A, batch, A, batch, A]) == 3


def test_of_one_flow_the_youngest_gives_way() -> None:
    assert Simulation().policy.victim([A] * 5) == 4


@pytest.mark.law("Shares")
@pytest.mark.parametrize("seed", range(4))
def test_with_one_flow_every_step_is_that_of_first_come_first_served(seed: int) -> None:
    """Prompts, blocks, slots, aborts and preemption at random: the same spans in the same order, to the last."""

    def batches(*, is_reference: bool) -> list[list[tuple[str, int, int]]]:
        generator = random.Random(seed)
        policy = FirstCome if is_reference else FairShares
        simulation = Simulation(
            num_places=6,
            num_blocks=40,
            num_slots=2,
            max_bypass_s=0.3,
            max_batch_tokens=48,
            policy_kind=policy,
        )
        found = []
        for _ in range(600):
            if generator.random() < 0.3 and len(simulation.waiting) < 200:
                adapter = generator.choice([None, None, "x", "y", "z"])
                simulation.ask(Share(), generator.randrange(1, 200), generator.randrange(1, 200), adapter=adapter)
            if generator.random() < 0.02 and len(simulation.waiting):
                gone = generator.choice(list(simulation.waiting))
                simulation.scheduler.withdraw(lambda each, gone=gone: each is gone)  # type: ignore[misc]
            found.append(told(simulation.step()))
        assert simulation.scheduler.num_preemptions > 0
        return found

    assert batches(is_reference=False) == batches(is_reference=True)


def told(batch: Batch) -> list[tuple[str, int, int]]:
    return [(span.sequence.request.request_id, span.start, span.length) for span in batch.spans]


@pytest.mark.parametrize("num_flows", [2, 20])
def test_flows_cost_no_more_steps_than_first_come_first_served(num_flows: int) -> None:
    """The same requests in one flow and in many: steps, tokens per step and simulated time within three per cent."""

    def drained(*, flows: int) -> Simulation:
        generator = random.Random(5)
        simulation = Simulation(num_places=32, num_blocks=600, num_slots=4)
        for number in range(600):
            share = Share(flow=f"f{number % flows}", weight=1 + number % flows % 3)
            adapter = generator.choice([None, "x", "y", "z"])
            simulation.ask(share, generator.randrange(8, 300), generator.randrange(4, 80), adapter=adapter)
        simulation.drain()
        return simulation

    fair, reference = drained(flows=num_flows), drained(flows=1)
    assert fair.num_steps <= reference.num_steps / 0.97
    assert fair.num_tokens / fair.num_steps >= 0.97 * reference.num_tokens / reference.num_steps
    assert fair.now <= reference.now / 0.97
