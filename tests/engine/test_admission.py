"""Which of those that wait is looked at, and what looking costs: the real scheduler on simulated steps."""

from __future__ import annotations

import pytest

from serve_app.core.shares import Share
from serve_app.engine.scheduler.admission import MOST_COMPARED, PromptsInWork
from serve_app.engine.scheduler.queue import MAX_LOOKAHEAD, MOST_PASSED_OVER
from serve_app.engine.scheduler.sequence import Sequence
from tests.engine.simulated import Simulation

A, B = Share(flow="a"), Share(flow="b")


def in_work(simulation: Simulation) -> PromptsInWork:
    return simulation.scheduler._admission._in_work


def test_two_prompts_are_compared_once_however_many_steps_one_of_them_takes() -> None:
    simulation = Simulation(prefix_cache=True, max_batch_tokens=64)
    first = simulation.ask(A, 4000, 4, salt=7)
    same = [simulation.ask(A, 4000, 4, salt=7) for _ in range(20)]
    others = [simulation.ask(A, 4000, 4) for _ in range(5)]
    simulation.run(10)
    assert not first.is_prompt_computed
    assert not any(each.place.started_at for each in same)
    assert all(each.place.started_at for each in others)
    assert in_work(simulation).num_compared <= 26 * 6
    before = in_work(simulation).num_compared
    simulation.run(40)
    assert not first.is_prompt_computed
    assert in_work(simulation).num_compared == before


def test_one_that_came_back_is_compared_anew_as_what_it_found_is_not_what_it_had_found() -> None:
    simulation = Simulation(prefix_cache=True, max_batch_tokens=64)
    first = simulation.ask(A, 1000, 4, salt=7)
    same = simulation.ask(A, 1000, 4, salt=7)
    simulation.run(2)
    simulation.scheduler._preempt(first)
    simulation.run(1)
    assert (first.place.started_at, same.place.started_at) != (None, None)
    assert (first.place.holding is None) != (same.place.holding is None), "one of the two waits for the other"
    assert in_work(simulation).num_compared == 2


def test_no_more_are_compared_in_a_step_than_may_be_and_of_those_that_have_gone_nothing_is_kept() -> None:
    simulation = Simulation(prefix_cache=True, num_places=64, num_blocks=100_000, max_batch_tokens=64)
    for _ in range(60):
        simulation.ask(A, 500, 1)
    before, most = 0, 0
    while simulation.scheduler.has_work:
        simulation.step()
        most = max(most, in_work(simulation).num_compared - before)
        before = in_work(simulation).num_compared
    assert 0 < most <= MOST_COMPARED
    simulation.step()
    assert not in_work(simulation)._verdicts


def begun(sequences: list[Sequence]) -> list[Sequence]:
    """In the order in which they began."""
    return sorted(
        (each for each in sequences if each.place.started_at is not None), key=lambda each: each.place.started_at or 0.0
    )


@pytest.mark.law("Nobody is held up")
def test_many_that_wait_for_a_prefix_in_work_hide_nobody_behind_them() -> None:
    simulation = Simulation(prefix_cache=True, num_places=64, num_blocks=100_000, max_batch_tokens=64)
    first, *others = [simulation.ask(A, 4000, 4, salt=7) for _ in range(256)]
    short = simulation.ask(A, 10, 4)
    simulation.run(-(-256 // MAX_LOOKAHEAD) + 1)
    assert short.place.started_at is not None
    assert not first.is_prompt_computed
    assert begun(others) == []
    simulation.drain()
    assert begun([first, *others]) == [first, *others]


@pytest.mark.law("Nobody is held up")
@pytest.mark.parametrize("num_adapters", [1, 300])
def test_many_that_lack_a_slot_hide_nobody_behind_them(num_adapters: int) -> None:
    simulation = Simulation(num_places=8, num_slots=1, num_blocks=100_000, max_bypass_s=1e9)
    simulation.ask(A, 8, 400, adapter="first")
    simulation.step()
    lacking = [simulation.ask(A, 8, 4, adapter=f"other{each % num_adapters}") for each in range(300)]
    base, resident = simulation.ask(A, 8, 4), simulation.ask(A, 8, 4, adapter="first")
    simulation.step()
    assert base.place.started_at is not None
    assert resident.place.started_at is not None
    assert begun(lacking) == []
    simulation.drain()
    assert begun(lacking) == lacking


def test_many_that_lack_blocks_hide_nobody_behind_them() -> None:
    simulation = Simulation(num_places=8, num_blocks=100, max_bypass_s=1e9)
    simulation.ask(A, 60 * 16, 100)
    simulation.step()
    large = [simulation.ask(A, 80 * 16, 4) for _ in range(200)]
    small = simulation.ask(A, 16, 4)
    simulation.step()
    assert small.place.started_at is not None
    simulation.drain()
    assert begun(large) == large


def test_many_whose_adapter_is_on_its_way_hide_nobody_behind_them() -> None:
    simulation = Simulation(num_places=8, num_slots=1, num_blocks=100_000)
    simulation.slots.is_ready = lambda model: False  # type: ignore[method-assign]
    for _ in range(300):
        simulation.ask(A, 8, 4, adapter="slow")
    base = simulation.ask(A, 8, 4)
    simulation.run(-(-300 // MAX_LOOKAHEAD) + 1)
    assert base.place.started_at is not None


@pytest.mark.parametrize("shares", [[A], [A, B]])
def test_a_pass_goes_through_so_many_and_no_more_whatever_they_lack(shares: list[Share]) -> None:
    simulation, num_asked = Simulation(), 0
    for _ in range(MOST_PASSED_OVER):
        for share in (A, *shares):
            simulation.ask(share, 8, 4)

    def lacks(sequence: Sequence) -> bool:
        nonlocal num_asked
        num_asked += 1
        return True

    found = simulation.waiting.in_turn(lambda line, first: (1, 0.0, line.number), lacks=lacks)
    assert list(found) == []
    assert MAX_LOOKAHEAD < num_asked <= MOST_PASSED_OVER


def test_one_that_was_passed_over_for_long_enough_is_waited_for_behind_whatever_else_lacks() -> None:
    """Small ones come for ever, and each takes what a large one lacks."""
    simulation = Simulation(num_places=32, num_blocks=100, max_bypass_s=1.0)
    for _ in range(8):
        simulation.ask(A, 10 * 16, 20)
    simulation.step()
    large = [simulation.ask(A, 80 * 16, 4) for _ in range(3)]
    while not all(each.place.started_at for each in large):
        if simulation.num_waiting("a") < 20:
            simulation.ask(A, 10 * 16, 20)
        simulation.step()
        assert simulation.now < 6.0
    assert begun(large) == large


def test_what_one_waited_for_its_turn_does_not_count_as_being_passed_over() -> None:
    """Else everybody would be waited for at once where all wait long, and nobody could use what is there."""
    simulation = Simulation(num_places=2, has_spare=False, num_slots=1, max_bypass_s=1.0)
    simulation.ask(A, 8, 2000, adapter="resident")
    before = simulation.ask(A, 8, 200)
    simulation.step()
    lacking = simulation.ask(A, 8, 4, adapter="other")
    same = [simulation.ask(A, 8, 10, adapter="resident") for _ in range(100)]
    while not before.is_finished:
        simulation.step()
    assert simulation.now > 2 * simulation.scheduler._admission._max_bypass_s
    began_at = simulation.now
    simulation.run(2)
    assert same[0].place.started_at is not None
    while (running := begun(same)) and simulation.now < began_at + 3.0:
        simulation.step()
    assert 0 < len(running) < len(same), "but when it was passed over for long enough it is waited for"
    simulation.drain()
    assert lacking.is_finished
