"""What a pass over those that wait costs, and that what it saves changes no step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.shares import Share
from serve_app.engine.scheduler.order import Order
from serve_app.engine.scheduler.queue import MOST_LOOKED_AT, KeyOf, Lacks, Line, WaitingQueue, lacks_nothing, no_debt
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.engine.scheduler.turns import DebtOf, Key, Rules, with_debt
from tests.engine.simulated import Simulation
from tests.engine.test_fairness import told

A, B = Share(flow="a"), Share(flow="b")
PRIORITIES: list[Literal["interactive", "standard", "batch"]] = ["interactive", "standard", "batch"]


def test_a_pass_costs_what_is_looked_at_and_not_the_flows_that_wait() -> None:
    simulation = Simulation(num_places=8)
    for number in range(4096):
        simulation.ask(Share(flow=f"f{number % 1024}"), 40, 4)
    num_keys = 0

    def counted(line: Line, first: Sequence) -> Key:
        nonlocal num_keys
        num_keys += 1
        return (1, simulation.counters.of(line.share.flow), line.number)

    waiting = simulation.waiting
    assert len(list(islice(waiting.in_turn(counted, now=0.0), 8))) == 8
    assert num_keys <= 1024 + 3 * 8, "each line when it has come"
    num_keys = 0
    assert len(list(islice(waiting.in_turn(counted, now=0.0), 8))) == 8
    assert num_keys <= 4 * 8
    num_keys = 0
    assert len(list(waiting.in_turn(counted, now=0.0))) == MOST_LOOKED_AT, "where nobody has what it needs"
    assert num_keys <= 4 * MOST_LOOKED_AT


@pytest.mark.parametrize("num_flows", [64, 512])
def test_steps_ask_for_few_keys_however_many_flows_wait(num_flows: int) -> None:
    """Each is asked for when its turn is near, and not whenever something was computed for its flow."""
    simulation = Simulation(num_places=64, num_blocks=100_000, max_batch_tokens=512)
    num_keys, key = 0, simulation.scheduler._admission._key

    def counted(line: Line, first: Sequence, now: float) -> Key:
        nonlocal num_keys
        num_keys += 1
        return key(line, first, now)

    simulation.scheduler._admission._key = counted  # type: ignore[method-assign]
    for number in range(300):
        while len(simulation.waiting) < 2 * num_flows:
            simulation.ask(Share(flow=f"f{len(simulation.stories) % num_flows}"), 40, 12)
        if number == 100:
            num_keys, num_begun = 0, sum(story.first_at is not None for story in simulation.stories.values())
        simulation.step()
    num_begun = sum(story.first_at is not None for story in simulation.stories.values()) - num_begun
    assert num_begun > 400
    assert num_keys / num_begun <= 8, "and as many more as have begun, not as wait"


class PlainQueue(WaitingQueue):
    """The reference: of all lines the least key, whenever one is looked at."""

    def in_turn(
        self, key_of: KeyOf, *, now: float, debt_of: DebtOf = no_debt, lacks: Lacks = lacks_nothing
    ) -> Iterator[Sequence]:
        if len(self._lines) == 1:
            return super().in_turn(key_of, now=now, debt_of=debt_of, lacks=lacks)
        return self._plainly(key_of, debt_of, lacks)

    def _plainly(self, key_of: KeyOf, debt_of: DebtOf, lacks: Lacks) -> Iterator[Sequence]:
        most, looked_at = max(2, 128 // max(1, len(self._lines))), Counter[int]()
        ahead = {line.number: list(line.sequences.values())[::-1] for line in self._lines.values()}
        for _ in range(MOST_LOOKED_AT):
            if not (left := [line for line in self._lines.values() if ahead[line.number]]):
                return
            keys = {line: key_of(line, ahead[line.number][-1]) for line in left}
            least = min(left, key=lambda line: with_debt(keys[line], debt_of(line.share.flow)))
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


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.booleans()), max_size=80))
def test_the_least_key_is_found_though_only_those_that_fell_are_told(moves: list[tuple[int, int, bool]]) -> None:
    """Lines come, rise untold, fall and are touched, and leave."""
    order, keys = Order(), dict[int, Key]()
    for line, rise, leaves in moves:
        if leaves:
            order.remove(line)
            keys.pop(line, None)
        elif line in keys and rise:
            keys[line] = (1, keys[line][1] + rise, line)
        else:
            keys[line] = (1, keys.get(line, (1, 0.0, line))[1] - 1.5, line)
            order.touch(line)
        for touched in order.take_touched():
            order.put(touched, keys[touched])
        assert order.pop_below(min(keys.values(), default=(0, 0.0, 0)), keys.__getitem__) is None
        if keys:
            found = order.pop_below(None, keys.__getitem__)
            assert found is not None
            assert found[1] == min(keys.values())
            order.touch(found[0])


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
