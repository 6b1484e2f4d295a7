"""Ten times what an engine can do, nearly all of it one flow's: the others hardly notice."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from serve_app.core.shares import Share
from tests.engine.simulated import Simulation, percentile

NUM_FLOWS = 20
PLACES = 20
BUDGET = 260
PROMPT, TOKENS = 50, 20
OVERLOAD = 10.0
SHARE_USED = 0.7
"""Of its share, by each of the flows that are not greedy."""
MOST_WAITING = 400
"""Of the greedy flow; the door refuses more."""
SECONDS = 20.0
OTHERS = [f"f{number}" for number in range(1, NUM_FLOWS)]
Arrival = tuple[float, str]


def arrivals(flow: str, per_s: float) -> Iterator[Arrival]:
    generator, now = random.Random(flow), 0.0
    while (now := now + generator.expovariate(per_s)) < SECONDS:
        yield now, flow


def capacity() -> float:
    """Requests per second where more wait than can be computed."""
    simulation = Simulation(num_places=PLACES, max_batch_tokens=BUDGET)
    for _ in range(500):
        simulation.ask(Share(), PROMPT, TOKENS)
    simulation.drain()
    return 500 / simulation.now


def simulated(asked: list[Arrival], simulation: Simulation, shares: dict[str, Share]) -> Simulation:
    to_come = sorted(asked, reverse=True)
    while simulation.now < SECONDS:
        while to_come and to_come[-1][0] <= simulation.now:
            at, flow = to_come.pop()
            if flow != "greedy" or len(simulation.waiting) < MOST_WAITING:
                sequence = simulation.ask(shares[flow], PROMPT, TOKENS)
                simulation.stories[sequence.request.request_id].asked_at = at
        simulation.step()
    return simulation


@pytest.fixture(scope="module")
def load() -> list[Arrival]:
    """As many times the capacity as said."""
    whole = capacity()
    each = SHARE_USED * whole / NUM_FLOWS
    asked = [arrival for flow in OTHERS for arrival in arrivals(flow, each)]
    return [*asked, *arrivals("greedy", OVERLOAD * whole - each * len(OTHERS))]


def together(load: list[Arrival], shares: dict[str, Share]) -> Simulation:
    return simulated(load, Simulation(num_places=PLACES, max_batch_tokens=BUDGET), shares)


@pytest.fixture(scope="module")
def fair(load: list[Arrival]) -> Simulation:
    return together(load, {flow: Share(flow=flow) for flow in (*OTHERS, "greedy")})


def test_a_greedy_flow_costs_the_others_little_of_what_they_had_alone_with_their_share(
    load: list[Arrival], fair: Simulation
) -> None:
    """Alone with its share: a twentieth of the places and of the tokens, in steps as long as those of all."""
    long = fair.now / fair.num_steps / fair.prices.step_s
    for flow in OTHERS:
        alone = simulated(
            [arrival for arrival in load if arrival[1] == flow],
            Simulation(num_places=1, max_batch_tokens=BUDGET // NUM_FLOWS, stretch=long),
            {flow: Share(flow=flow)},
        )
        assert percentile(fair.first_token_s([flow]), 95) <= 1.5 * percentile(alone.first_token_s([flow]), 95)
    assert len(fair.first_token_s(OTHERS)) >= 0.98 * sum(story.flow in OTHERS for story in fair.stories.values())


def test_first_come_first_served_is_ten_times_worse_for_them(load: list[Arrival], fair: Simulation) -> None:
    first_come = together(load, dict.fromkeys((*OTHERS, "greedy"), Share()))
    theirs = percentile(first_come.first_token_s(["local"]), 95)
    assert theirs > 10 * percentile(fair.first_token_s(OTHERS), 95)
    assert fair.num_tokens / fair.num_steps >= 0.97 * first_come.num_tokens / first_come.num_steps


def test_what_the_greedy_flow_gets_is_what_the_others_leave(fair: Simulation) -> None:
    num_begun = {flow: len(fair.first_token_s([flow])) for flow in (*OTHERS, "greedy")}
    whole = capacity() * SECONDS
    assert sum(num_begun.values()) >= 0.95 * whole, "nothing of the engine is left idle"
    assert num_begun["greedy"] >= 0.25 * whole
