"""Rows that a flow has beyond others' stretch a step so far and no further; each has its turn."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from serve_app.core.shares import Priority, Share
from serve_app.engine.scheduler.planner import LOOK_AGAIN, LOOK_SELDOM, MOST_GROWTH, Pace
from serve_app.engine.scheduler.policy import MAX_KNOWN, FairShares
from tests.engine.simulated import NoPace, Prices, Simulation

CPU = Prices(step_s=0.032, prompt_s=0.0025, decode_s=0.0021)
"""About a model of half a billion weights on two cores: 34, 49 and 166 ms for 1, 8 and 64 rows."""
GPU = Prices(step_s=0.008, prompt_s=0.00001, decode_s=0.00001)
STRETCH = 1.75


def running(rows: dict[Share, int], prices: Prices = CPU, pace: Pace | None = None, num_places: int = 64) -> Simulation:
    """So many sequences of each share that decode for long, and no prompts to compute any more."""
    pace = pace or Pace(STRETCH)
    made = Simulation(num_places=num_places, has_spare=False, prices=prices, pace=pace, num_blocks=20_000)
    for share, number in rows.items():
        for _ in range(number):
            made.ask(share, 8, 4000)
    while any(not each.is_prompt_computed for each in (*made.waiting, *made.scheduler.running)):
        made.step()
    assert len(made.scheduler.running) == sum(rows.values())
    return made


def watched(simulation: Simulation, num_steps: int) -> list[Counter[str]]:
    """Rows of each flow, step by step."""
    found = []
    for _ in range(num_steps):
        batch = simulation.step()
        found.append(Counter(span.sequence.request.share.flow for span in batch.spans))
    return found


ONE, MANY, BATCH = Share(flow="one"), Share(flow="many"), Share(flow="batch", priority="batch")


@pytest.mark.law("Shares")
@pytest.mark.parametrize(("few", "many"), [(1, 63), (4, 60), (8, 24), (8, 56)])
def test_rows_beyond_anothers_stretch_its_steps_by_no_more_than_they_may(few: int, many: int) -> None:
    made = running({ONE: few, MANY: many})
    watched(made, 60)
    found = watched(made, 200)
    assert {rows["one"] for rows in found} == {few}, "nobody's own rows sit out for who has more"
    alone_s, level_s = (CPU.step_s + CPU.decode_s * rows for rows in (few, 2 * few))
    allowed_s = max(STRETCH * alone_s, (1 + (STRETCH - 1) / 2) * level_s)
    took_s = [CPU.step_s + CPU.decode_s * rows.total() for rows in found]
    assert max(took_s) <= allowed_s * (1 + (MOST_GROWTH - 1) / 2)
    assert statistics.mean(took_s) >= 0.85 * min(allowed_s, CPU.step_s + CPU.decode_s * 64), "what is allowed is used"
    assert min(rows["many"] for rows in found) >= few


@pytest.mark.law("Shares")
def test_all_rows_of_a_flow_have_their_turns() -> None:
    made = running({ONE: 1, MANY: 63})
    watched(made, 20)
    before = {id(each): each.num_generated for each in made.scheduler.running}
    watched(made, 600)
    gained = [each.num_generated - before[id(each)] for each in made.scheduler.running if each.request.share == MANY]
    assert max(gained) - min(gained) <= 2
    assert min(gained) > 600 * 10 // 63


@pytest.mark.law("Shares")
@pytest.mark.parametrize("other", [None, ONE])
def test_rows_go_on_with_their_turns_where_their_flow_was_left_out_of_steps(other: Share | None) -> None:
    """As the class `batch` is, while a prompt of a higher class is computed."""
    policy, decoding, seen = FairShares(), [ONE, *[BATCH] * 10], Counter[int]()
    for _ in range(100):
        out, _ = policy.rows(decoding, lambda num_level, num_beyond: 2)
        seen.update(set(range(1, 11)) - out)
        policy.rows([ONE] if other is None else [other, *[MANY] * 10], lambda num_level, num_beyond: 2)
    assert (min(seen.values()), max(seen.values())) == (30, 30)


def test_turns_are_remembered_of_so_many_flows_and_no_more() -> None:
    policy = FairShares()
    for number in range(MAX_KNOWN + 3):
        policy.rows([ONE, *[Share(flow=f"of many {number}")] * 2], lambda num_level, num_beyond: 0)
    assert len(policy._rotation) == MAX_KNOWN


@pytest.mark.parametrize(
    "rows",
    [
        {MANY: 64},
        {ONE: 32, MANY: 32},
        {Share(flow="three", weight=3.0): 48, ONE: 16},
        {Share(flow=f"of twenty {number}"): 3 for number in range(20)},
        {Share(flow="first", priority="interactive"): 60, Share(flow="later", priority="batch"): 4},
    ],
    ids=["alone", "as many", "by weight", "of twenty", "a higher class"],
)
def test_nobody_sits_out_for_who_has_as_many_for_its_weight_or_is_of_a_lower_class(rows: dict[Share, int]) -> None:
    made = running(rows)
    assert all(found.total() == sum(rows.values()) for found in watched(made, 2 * LOOK_AGAIN))


class NoneBeyond(NoPace):
    def rows(self, num_level: int, num_beyond: int, *, is_shared: bool = False) -> int:
        return 0


HEAVY = Share(flow="heavy", weight=12.0)


@pytest.mark.parametrize(
    ("rows", "level"),
    [
        ({ONE: 3, MANY: 20}, {"one": 3, "many": 3}),
        ({HEAVY: 12, ONE: 8}, {"heavy": 12, "one": 1}),
        ({HEAVY: 20, ONE: 1}, {"heavy": 12, "one": 1}),
        ({Share(flow="light", weight=0.25): 5, ONE: 3}, {"light": 1, "one": 3}),
        ({ONE: 9, MANY: 9, BATCH: 1}, {"one": 9, "many": 9, "batch": 1}),
        ({ONE: 2, MANY: 9, BATCH: 9}, {"one": 2, "many": 2, "batch": 2}),
        ({ONE: 5, BATCH: 9}, {"one": 5, "batch": 5}),
    ],
)
def test_the_level_is_what_the_least_has_for_its_weight(rows: dict[Share, int], level: dict[str, int]) -> None:
    made = running(rows, pace=NoneBeyond(STRETCH))
    assert watched(made, 3) == [Counter(level)] * 3


@pytest.mark.parametrize("priority", ["standard", "batch"])
def test_a_class_that_is_no_higher_sits_out(priority: Priority) -> None:
    made = running({ONE: 2, Share(flow="many", priority=priority): 60})
    watched(made, 60)
    assert statistics.mean(rows["many"] for rows in watched(made, 100)) < 20


def test_where_a_row_costs_next_to_nothing_nobody_sits_out_but_to_see_what_it_costs() -> None:
    made = running({ONE: 1, MANY: 63}, prices=GPU)
    watched(made, 60)
    short = [rows for rows in watched(made, 2 * LOOK_AGAIN * LOOK_SELDOM) if rows.total() < 64]
    assert len(short) <= 2


def test_what_is_beyond_is_shared_by_those_that_want_it() -> None:
    """Water is poured: whoever has least beyond the level is given first."""
    rows = {ONE: 2, Share(flow="some"): 6, MANY: 40, Share(flow="heavy", weight=2.0): 14}
    made = running(rows)
    watched(made, 60)
    found = watched(made, 100)
    given = {flow: statistics.mean(each[flow] for each in found) for flow in ("one", "some", "many", "heavy")}
    assert given["one"] == 2
    assert 3 < given["some"] == pytest.approx(given["many"], abs=0.5)
    assert given["heavy"] == pytest.approx(2 * given["many"], abs=1)


def test_as_many_tokens_come_of_a_crowd_where_arithmetic_is_what_costs() -> None:
    """Eight beside 56: a step has fewer rows and takes nearly as much less. A step of these prices that takes 1.375
    times as long as one of sixteen has 27 rows of 64, and 0.78 of the tokens per second.
    """
    tokens = {}
    for name, pace in (("all", NoPace(STRETCH)), ("by turns", Pace(STRETCH))):
        made = running({ONE: 8, MANY: 56}, pace=pace)
        began, before = made.now, made.num_tokens
        watched(made, 400)
        tokens[name] = (made.num_tokens - before) / (made.now - began)
    assert tokens["by turns"] > 0.77 * tokens["all"]


def test_prompts_get_on_beside_rows_that_take_turns() -> None:
    made = running({ONE: 1, MANY: 60})
    asked = made.ask(Share(flow="new"), 200, 4)
    watched(made, 60)
    assert asked.is_prompt_computed


def test_nobody_sits_out_for_who_has_fewer_as_it_waits_for_its_turn() -> None:
    """Of flows that all wait each has its turns, and a step is as full as first come, first served would make it."""
    drained = {}
    for name, pace in (("all", NoPace(STRETCH)), ("by turns", Pace(STRETCH))):
        made = running({ONE: 4, MANY: 60}, pace=pace)
        made.ask(ONE, 8, 10)
        drained[name] = [rows.total() for rows in watched(made, 20)]
    assert drained["by turns"] == drained["all"]
