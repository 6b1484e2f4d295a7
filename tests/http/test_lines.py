"""Who waits in a proxy has a turn, and whoever was told to come now has most of those of its flow."""

from __future__ import annotations

import random

import pytest

from serve_app.http.lines import TURNS, Lines
from serve_app.http.visits import Visit


def visit(flow: str = "", *, is_due: bool = False) -> Visit:
    return Visit(lambda _: None, lambda: None, flow, is_due=is_due, is_extra=False)


def test_those_of_one_kind_have_their_turns_in_the_order_in_which_they_came() -> None:
    for is_due in (False, True):
        lines, came = Lines(), [visit(is_due=is_due) for _ in range(9)]
        for each in came:
            lines.add(each)
        assert [lines.take("") for _ in came] == came


def test_whoever_is_due_goes_before_others_but_for_one_turn_of_so_many() -> None:
    lines = Lines()
    for number in range(20):
        lines.add(visit(is_due=number >= 10))
    turns = [lines.take("").is_due for _ in range(20)]
    assert turns[:13] == [True, True, True, False] * 3 + [True]
    assert sum(turns) == 10
    assert TURNS == 4


def test_turns_that_nobody_else_waited_for_are_not_owed() -> None:
    lines = Lines()
    for _ in range(8):
        lines.add(visit(is_due=True))
        lines.take("")
    lines.add(visit())
    lines.add(visit(is_due=True))
    assert lines.take("").is_due


def test_a_flow_that_had_its_turn_comes_behind_the_others() -> None:
    lines = Lines()
    for flow in ("a", "a", "b", "c"):
        lines.add(visit(flow))
    assert list(lines.flows) == ["a", "b", "c"]
    lines.take("a")
    assert list(lines.flows) == ["b", "c", "a"]
    lines.take("b")
    assert list(lines.flows) == ["c", "a"]


@pytest.mark.parametrize("seed", range(5))
def test_who_waits_is_counted_and_nothing_is_left_of_who_does_not(seed: int) -> None:
    drawn = random.Random(seed)
    lines, there = Lines(), list[Visit]()
    for _ in range(500):
        if drawn.random() < 0.55:
            there.append(visit(drawn.choice("abc"), is_due=drawn.random() < 0.5))
            lines.add(there[-1])
        elif there and drawn.random() < 0.5:
            lines.remove(there.pop(drawn.randrange(len(there))))
        elif there:
            there.remove(lines.take(drawn.choice(list(lines.flows))))
        assert len(lines) == len(there)
        for flow in "abc":
            assert lines.num_of(flow) == sum(each.flow == flow for each in there)
            assert lines.num_of(flow, is_due=True) == sum(each.flow == flow and each.is_due for each in there)
        assert set(lines.flows) == {each.flow for each in there}
