"""Which of those that wait is looked at, and what looking costs: the real scheduler on simulated steps."""

from __future__ import annotations

from serve_app.core.shares import Share
from serve_app.engine.prompts_in_work import MOST_COMPARED, PromptsInWork
from tests.engine.simulated import Simulation

A = Share(flow="a")


def in_work(simulation: Simulation) -> PromptsInWork:
    return simulation.scheduler._admission._in_work


def test_two_prompts_are_compared_once_however_many_steps_one_of_them_takes() -> None:
    simulation = Simulation(prefix_cache=True, max_batch_tokens=64)
    first = simulation.ask(A, 4000, 4, salt=7)
    same = [simulation.ask(A, 4000, 4, salt=7) for _ in range(20)]
    others = [simulation.ask(A, 4000, 4) for _ in range(5)]
    simulation.run(10)
    assert not first.is_prompt_computed
    assert not any(each.started_at for each in same)
    assert all(each.started_at for each in others)
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
    assert (first.started_at, same.started_at) != (None, None)
    assert (first.holding is None) != (same.holding is None), "one of the two waits for the other"
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
