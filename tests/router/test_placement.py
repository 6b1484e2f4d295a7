"""Prompts go where the least is to be done; equals take turns."""

from __future__ import annotations

from collections import Counter

from serve_app.router.fleet import Placement
from serve_app.router.link import Standing


def test_sixteen_prompts_are_spread_evenly_over_two_idle_replicas():
    chosen = Placement().place([1] * 16, [Standing(work=0), Standing(work=0)])
    assert Counter(chosen) == {0: 8, 1: 8}


def test_requests_of_one_prompt_take_turns():
    placement = Placement()
    standings = [Standing(work=0), Standing(work=0), Standing(work=0)]
    assert [placement.place([1], standings)[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_replica_with_less_work_is_chosen_until_both_are_level():
    chosen = Placement().place([1] * 6, [Standing(work=4), Standing(work=0)])
    assert chosen[:4] == [1, 1, 1, 1]
    assert Counter(chosen[4:]) == {0: 1, 1: 1}


def test_work_is_relative_to_capacity():
    chosen = Placement().place([1] * 12, [Standing(work=0, capacity=200), Standing(work=0, capacity=100)])
    assert Counter(chosen) == {0: 8, 1: 4}


def test_a_prompt_with_many_samples_weighs_as_many():
    assert Placement().place([4, 1, 1, 1, 1], [Standing(work=0), Standing(work=0)]) == [0, 1, 1, 1, 1]
