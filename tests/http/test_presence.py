"""What is remembered of the flows that are in a proxy or were lately."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from serve_app.http.flows import Flows
from serve_app.http.presence import LATELY_S, NUM_BELIEVED, NUM_REMEMBERED, Presence


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_share_is_beside_those_who_are_there_or_were_lately() -> None:
    clock = Clock()
    presence = Presence(Flows(), clock=clock)
    assert presence.share_of("a") == 1 / 2, "one may come"
    for flow in ("a", "b", "c"):
        presence.enter(flow)
    presence.leave("b")
    assert presence.share_of("a") == 1 / 4
    assert presence.share_of("d") == 1 / 5
    clock.now += LATELY_S + 1
    assert presence.share_of("a") == 1 / 3, "b is forgotten"


def test_a_part_is_of_those_that_left_lately() -> None:
    clock = Clock()
    presence = Presence(Flows(), clock=clock)
    assert presence.part_of("a", belief=0.25) == 0.25
    for flow in "a" * NUM_BELIEVED + "b" * NUM_BELIEVED:
        presence.enter(flow)
        presence.leave(flow)
    assert presence.part_of("a", belief=1.0) == 2 / 3
    clock.now += LATELY_S + 1
    assert presence.part_of("a", belief=1.0) == 1.0


def test_a_weight_that_is_learned_later_counts() -> None:
    flows = Flows()
    presence = Presence(flows)
    presence.enter("of heavy")
    assert presence.share_of("other") == 1 / 3
    flows.learn([(b"x-api-key", b"any")], "heavy", 3.0)
    presence.enter("of heavy")
    assert presence.share_of("other") == 1 / 5
    assert presence.share_of("of heavy") == 3 / 4


@pytest.mark.parametrize("seed", range(5))
def test_what_is_counted_is_what_a_walk_over_all_would_count(seed: int) -> None:
    drawn, clock, flows = random.Random(seed), Clock(), Flows()
    presence = Presence(flows, clock=clock)
    for number in range(8):
        flows.learn([(b"x-api-key", str(number).encode())], str(number), drawn.choice([0.1, 1.0, 3.0]))
    inside: list[str] = []
    left: list[tuple[float, str]] = []
    for _ in range(3000):
        clock.now += drawn.choice([0.0, 0.01, 0.2])
        if drawn.random() < 0.5:
            inside.append(f"of {drawn.randrange(8)}")
            presence.enter(inside[-1])
        elif inside:
            flow = inside.pop(drawn.randrange(len(inside)))
            presence.leave(flow)
            left.append((clock.now, flow))
        left = [each for each in left if each[0] >= clock.now - LATELY_S][-NUM_REMEMBERED:]
        there = set(inside) | {flow for _, flow in left}
        weight = sum(flows.weight_of(flow) for flow in there - {"of 3"})
        own = flows.weight_of("of 3")
        assert presence.share_of("of 3") == pytest.approx(own / (own + 1 + weight))
        num_left = sum(flow == "of 3" for _, flow in left)
        assert presence.part_of("of 3", belief=0.5) == pytest.approx((num_left + 16) / (len(left) + 32))
        assert presence.inside == Counter(inside)
    for flow in inside:
        presence.leave(flow)
    clock.now += LATELY_S + 1
    assert presence.share_of("of nobody") == 1 / 2
    assert not presence._num_there
