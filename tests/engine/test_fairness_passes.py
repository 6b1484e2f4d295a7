"""What a pass over those that wait costs, and that what it saves changes no step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Literal

import pytest

from serve_app.core.shares import Share
from serve_app.engine.scheduler.policy import Key, Rules
from serve_app.engine.scheduler.queue import MOST_LOOKED_AT, KeyOf, Lacks, Line, WaitingQueue
from serve_app.engine.scheduler.sequence import Sequence
from tests.engine.simulated import Simulation
from tests.engine.test_fairness import told

A, B = Share(flow="a"), Share(flow="b")
PRIORITIES: list[Literal["interactive", "standard", "batch"]] = ["interactive", "standard", "batch"]


def test_a_pass_asks_each_line_once_and_again_where_it_was_looked_at() -> None:
    simulation = Simulation(num_places=8)
    for number in range(4096):
        simulation.ask(Share(flow=f"f{number % 1024}"), 40, 4)
    num_keys = 0

    def counted(line: Line, first: Sequence) -> Key:
        nonlocal num_keys
        num_keys += 1
        return (1, 0.0, line.number)

    waiting = simulation.waiting
    assert len(list(islice(waiting.in_turn(counted), 8))) == 8
    assert num_keys <= 1024 + 8, "each line once, and those that were looked at again"
    num_keys = 0
    assert len(list(waiting.in_turn(counted))) == MOST_LOOKED_AT, "where nobody has what it needs"
    assert num_keys <= 1024 + MOST_LOOKED_AT


class PlainQueue(WaitingQueue):
    """The reference: of all lines the least key, whenever one is looked at."""

    def in_turn(self, key_of: KeyOf, *, lacks: Lacks = lambda sequence: False) -> Iterator[Sequence]:
        most, looked_at = max(2, 128 // max(1, len(self._lines))), Counter[int]()
        ahead = {line.number: list(line.sequences.values())[::-1] for line in self._lines.values()}
        for _ in range(MOST_LOOKED_AT):
            if not (left := [line for line in self._lines.values() if ahead[line.number]]):
                return
            keys = {line: key_of(line, ahead[line.number][-1]) for line in left}
            least = min(left, key=keys.__getitem__)
            if lacks(ahead[least.number][-1]):
                while ahead[least.number] and lacks(ahead[least.number][-1]):
                    ahead[least.number].pop()
                continue
            looked_at[least.number] += 1
            yield ahead[least.number].pop()
            if looked_at[least.number] == most:
                ahead[least.number].clear()


@pytest.mark.parametrize("seed", range(4))
def test_whose_turn_it_is_is_what_asking_everybody_every_time_would_give(seed: int) -> None:
    """Flows of all weights and classes, adapters, blocks and places that lack, aborts, ages: the same steps."""

    def batches(queue_kind: type[WaitingQueue]) -> list[list[tuple[str, int, int]]]:
        generator = random.Random(seed)
        rules = Rules(age_s=0.5, max_wait_s=2.0, quantum=64.0)
        simulation = Simulation(
            rules=rules,
            num_places=6,
            num_blocks=24,
            num_slots=2,
            max_bypass_s=0.3,
            max_batch_tokens=48,
            queue_kind=queue_kind,
            prefix_cache=seed % 2 == 0,
        )
        shares = [Share(flow=f"f{each % 5}", weight=1 + each % 3, priority=PRIORITIES[each % 3]) for each in range(9)]
        found = []
        for _ in range(2000):
            for _ in range(generator.randrange(3) if len(simulation.waiting) < 60 else 0):
                adapter = generator.choice([None, "x", "y", "z"])
                lengths = generator.randrange(1, 150), generator.randrange(1, 120)
                simulation.ask(generator.choice(shares), *lengths, adapter=adapter)
            if generator.random() < 0.05 and (everybody := [*simulation.waiting, *simulation.scheduler.running]):
                gone = generator.choice(sorted(everybody, key=lambda each: each.request.request_id))
                for running in simulation.scheduler.withdraw(lambda each, gone=gone: each is gone):  # type: ignore[misc]
                    simulation.scheduler.release(running)
            found.append(told(simulation.step()))
        assert simulation.scheduler.num_preemptions > 0
        assert simulation.slots.num_loads > 10
        return found

    assert batches(WaitingQueue) == batches(PlainQueue)


def test_a_flow_whose_requests_lack_something_hides_no_other_ones() -> None:
    """Hundreds that wait for a slot are not looked through before somebody else's turn comes."""
    simulation = Simulation(num_places=8, num_slots=1, max_bypass_s=1e9)
    simulation.ask(A, 8, 400, adapter="first")
    simulation.step()
    for _ in range(500):
        simulation.ask(A, 8, 4, adapter="second")
    mine = simulation.ask(B, 8, 4)
    simulation.step()
    assert mine.place.started_at is not None
