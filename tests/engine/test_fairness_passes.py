"""What a pass over those that wait costs, and that what it saves changes no step."""

from __future__ import annotations

import random
from itertools import count, islice
from typing import Literal

import pytest

from serve_app.core.shares import Share
from serve_app.engine.fairness.counters import Counters
from serve_app.engine.fairness.turns import Rules
from tests.engine.simulated import Simulation
from tests.engine.test_fairness import told

A, B = Share(flow="a"), Share(flow="b")
PRIORITIES: list[Literal["interactive", "standard", "batch"]] = ["interactive", "standard", "batch"]


def test_a_pass_over_a_thousand_that_wait_costs_the_flows_and_what_begins() -> None:
    simulation = Simulation(num_places=8)
    for number in range(1024):
        simulation.ask(Share(flow=f"f{number % 64}"), 40, 4)
    num_keys = 0

    def counted(line: object, first: object) -> tuple[int, float, int]:
        nonlocal num_keys
        num_keys += 1
        return (1, 0.0, 0)

    begun = list(islice(simulation.waiting.in_turn(counted), 8))
    assert len(begun) == 8
    assert num_keys == 64, "no turn was given, so nothing has changed"
    whole = list(simulation.waiting.in_turn(counted))
    assert 64 <= len(whole) <= 128, "where nobody has what it needs, so far is looked"
    assert num_keys == 2 * 64
    for number in range(1024):
        simulation.ask(Share(flow=f"more{number}"), 40, 4)
    assert len(list(simulation.waiting.in_turn(counted))) <= 256, "however many flows there are"


class AlwaysChanged(Counters):
    """The reference: every key is asked for again, whenever one is looked at."""

    _numbers = count()

    @property  # type: ignore[override]
    def num_changes(self) -> int:
        return next(self._numbers)

    @num_changes.setter
    def num_changes(self, value: int) -> None:
        pass


@pytest.mark.parametrize("seed", range(2))
def test_a_key_that_is_not_asked_for_again_has_not_changed(seed: int) -> None:
    """Flows of all weights and classes, adapters, blocks and places that lack, at random: the same steps."""

    def batches(counters_kind: type[Counters]) -> list[list[tuple[str, int, int]]]:
        generator = random.Random(seed)
        rules = Rules(age_s=0.5, max_wait_s=2.0, quantum=64.0)
        simulation = Simulation(
            rules=rules,
            num_places=6,
            num_blocks=24,
            num_slots=2,
            max_bypass_s=0.3,
            max_batch_tokens=48,
            counters_kind=counters_kind,
        )
        shares = [Share(flow=f"f{each % 5}", weight=1 + each % 3, priority=PRIORITIES[each % 3]) for each in range(9)]
        found = []
        for _ in range(2000):
            for _ in range(generator.randrange(3) if len(simulation.waiting) < 60 else 0):
                adapter = generator.choice([None, "x", "y", "z"])
                lengths = generator.randrange(1, 150), generator.randrange(1, 120)
                simulation.ask(generator.choice(shares), *lengths, adapter=adapter)
            found.append(told(simulation.step()))
        assert simulation.scheduler.num_preemptions > 0
        assert simulation.slots.num_loads > 10
        return found

    assert batches(Counters) == batches(AlwaysChanged)


def test_a_flow_whose_requests_lack_something_hides_no_other_ones() -> None:
    """Hundreds that wait for a slot are not looked through before somebody else's turn comes."""
    simulation = Simulation(num_places=8, num_slots=1, max_bypass_s=1e9)
    simulation.ask(A, 8, 400, adapter="first")
    simulation.step()
    for _ in range(500):
        simulation.ask(A, 8, 4, adapter="second")
    mine = simulation.ask(B, 8, 4)
    simulation.step()
    assert mine.started_at is not None
