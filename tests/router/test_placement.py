"""Prompts go where they cost least: to what is warm, unless others wait there; equals take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil
from random import Random
from typing import Any

import pytest

from serve_app.core.cards import ReplicaCard, Residency
from serve_app.core.delta import PromptReport
from serve_app.core.names import ModelRef
from serve_app.core.prefixes import prefixes_of
from serve_app.router.placement import (
    BOUND,
    FEW,
    TOKENS_PER_S,
    Habits,
    Placement,
    PlacementPolicy,
    even_paces,
    within_bound,
)
from tests.fakes import model_card
from tests.router.virtual_fleet import BASE, VirtualFleet, VirtualReplica, adapter, asking, documents, questions

DOCUMENT, OTHER = documents(2)


def idle(*replica_ids: str, **changes: Any) -> list[VirtualReplica]:
    return [VirtualReplica(replica_id, **changes) for replica_id in replica_ids]


def chosen(
    placement: Placement, sizes: Sequence[int], replicas: Sequence[VirtualReplica], text: str = "Hello"
) -> list[int]:
    """The places of the replicas that the prompts of one request are given to."""
    choices = placement.begin()
    return [replicas.index(choices.choose(asking(text, n=size), replicas)[0]) for size in sizes]


@pytest.mark.parametrize("policy", ["warm", "least_work"])
def test_sixteen_prompts_are_spread_evenly_over_two_idle_replicas(policy: PlacementPolicy) -> None:
    assert Counter(chosen(Placement(policy), [1] * 16, idle("a", "b"))) == {0: 8, 1: 8}


@pytest.mark.parametrize("policy", ["warm", "least_work"])
def test_requests_of_one_prompt_take_turns(policy: PlacementPolicy) -> None:
    placement, replicas = Placement(policy), idle("a", "b", "c")
    assert [chosen(placement, [1], replicas)[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("policy", ["warm", "least_work"])
def test_the_replica_with_less_work_is_chosen_until_both_are_level(policy: PlacementPolicy) -> None:
    found = chosen(Placement(policy), [1] * 6, [VirtualReplica("a", work=4), VirtualReplica("b")])
    assert found[:4] == [1, 1, 1, 1]


def test_least_work_is_relative_to_capacity() -> None:
    found = chosen(
        Placement("least_work"), [1] * 12, [VirtualReplica("a", capacity=200), VirtualReplica("b", capacity=100)]
    )
    assert Counter(found) == {0: 8, 1: 4}


@pytest.mark.parametrize("policy", ["warm", "least_work"])
def test_a_prompt_with_many_samples_weighs_as_many(policy: PlacementPolicy) -> None:
    assert chosen(Placement(policy), [4, 1, 1, 1, 1], idle("a", "b")) == [0, 1, 1, 1, 1]


def test_power_of_two_takes_the_better_one_of_two() -> None:
    replicas = [VirtualReplica("a", work=9), *idle("b", "c", "d")]
    found = Counter(chosen(Placement("power_of_two", random=Random(0)), [0] * 100, replicas))
    assert found[0] == 0
    assert min(found[1], found[2], found[3]) > 10


def test_random_takes_any() -> None:
    found = Counter(chosen(Placement("random", random=Random(0)), [1] * 100, [VirtualReplica("a", work=9), *idle("b")]))
    assert min(found[0], found[1]) > 30


def test_a_policy_can_change_while_the_router_runs() -> None:
    placement, replicas = Placement(), idle("a", "b")
    first = chosen(placement, [1], replicas, DOCUMENT)
    placement.policy = "least_work"
    assert chosen(placement, [1, 1], replicas, DOCUMENT) != first * 2
    placement.policy = "warm"
    assert chosen(placement, [1], replicas, DOCUMENT) == first


@pytest.mark.law("Placement")
@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("at_once", [1, 4, 8, 16, 80])
def test_documents_asked_again_are_cached_nearly_as_on_one_replica(num_replicas: int, at_once: int) -> None:
    def asked(policy: PlacementPolicy, number: int) -> VirtualFleet:
        fleet = VirtualFleet.of(number, Placement(policy))
        fleet.in_turn([asking(text) for text in questions(documents(8), 10)], at_once=at_once)
        return fleet

    alone, together, by_work = asked("warm", 1), asked("warm", num_replicas), asked("least_work", num_replicas)
    assert together.num_cached >= 0.9 * alone.num_cached
    assert together.num_cached > by_work.num_cached
    assert together.now < by_work.now < alone.now * 3


def traffic(policy: PlacementPolicy, *, rate: float, text_of: Callable[[Random, int], str], num_routers: int = 1):
    """1500 requests by chance to four replicas that refuse when 16 sequences are there."""
    random = Random(1)
    placements = [Placement(policy, random=Random(number)) for number in range(num_routers)]
    fleet, now = VirtualFleet.of(4, *placements, max_waiting=16), 0.0
    for number in range(1500):
        now += random.expovariate(rate)
        request, num_tokens = asking(text_of(random, number)), random.randrange(1, 100)
        fleet.arrive(now, request, num_tokens, router=random.randrange(num_routers))
    fleet.run()
    return fleet


def nothing_shared(random: Random, number: int) -> str:
    return f"{number} " + "".join(random.choices("abcdefgh", k=random.randrange(40, 8000)))


LIBRARY = documents(100, num_tokens=1000)


def from_a_library(random: Random, number: int) -> str:
    return f"{LIBRARY[min(99, int(random.paretovariate(0.8)) - 1)]}\nquestion {number}"


@pytest.mark.law("Placement")
@pytest.mark.parametrize("num_routers", [1, 2])
@pytest.mark.parametrize(("text_of", "rate"), [(nothing_shared, 5.07), (from_a_library, 12.5)])
def test_at_95_percent_load_nobody_waits_longer_than_with_least_work(
    text_of: Callable[[Random, int], str], rate: float, num_routers: int
) -> None:
    warm, by_work = (
        traffic(policy, rate=rate, text_of=text_of, num_routers=num_routers) for policy in ("warm", "least_work")
    )
    assert warm.num_refused <= by_work.num_refused
    assert warm.percentile(0.99) <= by_work.percentile(0.99)


@pytest.mark.law("Placement")
def test_while_a_replica_idles_no_other_gets_more_than_its_share() -> None:
    random, placement = Random(2), Placement()
    replicas = idle("a", "b", "c", "d")
    num_idle = 0
    for number in range(2000):
        before = [each.work for each in replicas]
        replica, _ = placement.begin().choose(asking(f"{random.choice([DOCUMENT, OTHER])} {number}"), replicas)
        if min(before) == 0:
            num_idle += 1
            assert replica.work + 1 <= max(FEW, ceil(BOUND * (sum(before) + 1) / len(replicas)))
        replica.work += 1
        for each in replicas:
            each.work = max(0, each.work - (random.random() < 0.3))
        if number % 20 == 0:
            random.choice(replicas).work = 0
    assert num_idle > 100


def test_the_bound_follows_the_size_of_the_replicas() -> None:
    large, small, third = VirtualReplica("a", capacity=300, work=5), VirtualReplica("b", work=5), VirtualReplica("c")
    assert within_bound([large, small, third], 1) == [large, third]
    assert within_bound([large, small], 1) == [large, small]


@pytest.mark.law("Placement")
def test_a_list_on_one_prefix_stays_together_until_that_costs_more_than_it_saves() -> None:
    def asked(number: int) -> Counter[str]:
        choices, replicas = Placement().begin(), idle("a", "b", "c", "d")
        return Counter(choices.choose(asking(f"{DOCUMENT} {at}"), replicas)[0].replica_id for at in range(number))

    assert len(asked(8)) == 1
    many = asked(400)
    assert len(many) == 4
    assert max(many.values()) < 2 * min(many.values())


@pytest.mark.law("Placement")
def test_two_routers_agree_without_talking() -> None:
    replicas, placements = idle("a", "b", "c", "d"), [Placement(), Placement()]
    texts = documents(100, num_tokens=500)
    found = [
        [placement.begin().choose(asking(f"{text} {router}, and more"), replicas)[0].replica_id for text in texts]
        for router, placement in enumerate(placements)
    ]
    assert found[0] == found[1]
    assert min(Counter(found[0]).values()) > 10


def test_a_router_knows_what_a_replica_says_that_others_sent() -> None:
    replicas, placement = [VirtualReplica("a", work=3), VirtualReplica("b", work=1)], Placement()
    card = ReplicaCard(replica_id="a", model=model_card(), prefixes=prefixes_of(asking(DOCUMENT)).names)
    assert placement.begin().choose(asking(f"{OTHER} q"), replicas)[0].replica_id == "b"
    placement.warmth.hear(card)
    assert placement.begin().choose(asking(f"{DOCUMENT} q"), replicas)[0].replica_id == "a"


def test_what_may_not_be_shared_is_not_warm() -> None:
    replicas, placement = idle("a", "b"), Placement()

    def cost(**changes: Any) -> float:
        request = asking(DOCUMENT, changes.pop("model", BASE), **changes)
        return min(placement.begin().choose(request, [each])[1].num_warm for each in replicas)

    for each in replicas:
        placement.begin().choose(asking(DOCUMENT, salt="mine"), [each])
    assert cost(salt="mine") > 1800
    assert cost(salt="another's") == 0
    assert cost(salt="mine", model=adapter("v1")) == 0
    assert cost(salt="mine", model=ModelRef(base="other")) == 0


@pytest.mark.law("Placement")
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_the_slots_of_replicas_add_up(num_replicas: int) -> None:
    """As many adapters as all slots together: once each has been loaded, nothing is loaded any more."""
    random, fleet = Random(3), VirtualFleet.of(num_replicas, Placement())
    versions = [f"version-{number}" for number in range(4 * num_replicas)]
    for each in fleet.replicas:
        fleet.placements[0].warmth.hear(
            ReplicaCard(replica_id=each.replica_id, model=model_card(), residency=Residency(num_slots=each.num_slots))
        )
    fleet.in_turn([asking("Hi", adapter(version)) for version in versions * 2], at_once=1)
    num_loads = sum(each.num_loads for each in fleet.replicas)
    assert num_loads == len(versions)
    fleet.in_turn([asking("Hi", adapter(random.choice(versions))) for _ in range(200)], at_once=1)
    assert sum(each.num_loads for each in fleet.replicas) == num_loads


def test_a_hot_adapter_spreads() -> None:
    fleet = VirtualFleet.of(4, Placement())
    fleet.in_turn([asking("Hi", adapter("hot")) for _ in range(200)], at_once=40)
    assert min(each.num_given for each in fleet.replicas) > 25
    assert sum(each.num_loads for each in fleet.replicas) == 4


def test_a_slow_replica_gets_less_and_a_little_slower_one_as_much() -> None:
    assert even_paces([1000, 1500, 700]) == [1000, 1000, 1000]
    assert even_paces([1000, 1000, 100]) == [1000, 1000, 100]
    assert even_paces([50_000, None, 50_000]) == [50_000] * 3
    assert even_paces([None, None]) == [TOKENS_PER_S] * 2
    replicas = [*idle("a", "b", pace=2000.0), VirtualReplica("slow", pace=200.0)]
    for each in replicas:
        each.work = 1
    found = Counter(chosen(Placement(), [1] * 33, replicas))
    assert found[2] < 0.2 * found[0]


def test_a_cache_that_does_not_keep_its_promise_loses_its_weight() -> None:
    replicas, placement = [VirtualReplica("a", work=20), VirtualReplica("b", work=1)], Placement()
    for _ in range(100):
        _, guess = placement.begin().choose(asking(DOCUMENT), replicas[:1])
        guess.habits.learn_prompt(guess, PromptReport(num_tokens=2000, num_cached_tokens=0))
    assert placement.habits_of("tiny").trust < 0.01
    assert placement.begin().choose(asking(DOCUMENT), replicas)[0].replica_id == "b"


def test_habits_follow_what_replicas_say() -> None:
    placement = Placement()
    habits: Habits = placement.habits_of("tiny")
    for _ in range(200):
        _, guess = placement.begin().choose(asking(DOCUMENT), idle("a"))
        habits.learn_prompt(guess, PromptReport(num_tokens=4000, num_cached_tokens=3000))
        habits.learn_completion(7)
    assert habits.bytes_per_token == pytest.approx(2, rel=0.01)
    assert habits.prompt_tokens == pytest.approx(1000, rel=0.01)
    assert habits.completion_tokens == pytest.approx(7, rel=0.01)
