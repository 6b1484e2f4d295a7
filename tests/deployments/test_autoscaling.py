"""The policy that follows the work, as Serve's controller calls it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingPolicy

from serve_app.core.cards import ReplicaCard
from serve_app.deployments.autoscaling import POLICY, FollowWork, Work
from serve_app.deployments.model import work_of
from tests.fakes import replica_card

IDLE = Work(sequences=0, kv_cache=0, wait_s=0)
HALF = Work(sequences=0.5, kv_cache=0.25, wait_s=0)
FULL = Work(sequences=1, kv_cache=0.5, wait_s=0)
QUEUED = Work(sequences=2.1, kv_cache=1, wait_s=0)
LATE = Work(sequences=0.2, kv_cache=0.1, wait_s=3)


@pytest.mark.parametrize(
    ("works", "wanted"),
    [
        ([HALF], 1),
        ([FULL], 2),
        ([QUEUED], 3),
        ([HALF, HALF], 2),
        ([FULL, FULL], 3),
        ([Work(sequences=0.1, kv_cache=1, wait_s=0)], 2),
        ([HALF, IDLE], 1),
        ([IDLE, IDLE, IDLE], 0),
        ([LATE], 2),
        ([LATE, HALF], 3),
    ],
)
def test_it_wants_as_many_replicas_as_keep_each_at_its_share(works: list[Work], wanted: int) -> None:
    assert FollowWork().wanted(works, num_running=len(works), num_now=len(works)) == wanted


def test_a_share_and_a_wait_are_settings() -> None:
    assert FollowWork(target_share=1.0).wanted([FULL], num_running=1, num_now=1) == 1
    assert FollowWork(target_wait_s=4.0).wanted([LATE], num_running=1, num_now=1) == 1


def test_nothing_is_taken_away_while_a_replica_starts_or_has_not_reported() -> None:
    assert FollowWork().wanted([HALF], num_running=1, num_now=2) == 2
    assert FollowWork().wanted([HALF], num_running=2, num_now=2) == 2
    assert FollowWork().wanted([], num_running=0, num_now=1) == 1
    assert FollowWork().wanted([QUEUED], num_running=1, num_now=2) == 3


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a replica says of its load."""

    card: ReplicaCard
    num_open: int
    wait_s: float


@pytest.mark.parametrize(
    ("blocks", "free", "kv_cache"), [(100, 25, 0.75), (100, 100, 0.0), (0, 0, 0.0)], ids=["in use", "free", "none"]
)
def test_a_replica_reports_how_full_it_is(blocks: int, free: int, kv_cache: float) -> None:
    card = replica_card()
    load = replace(card.load, num_blocks=blocks, num_free_blocks=free)
    card = replace(card, load=load, model=replace(card.model, max_num_sequences=8))
    assert work_of(Loaded(card, 12, 1.5)) == Work(sequences=1.5, kv_cache=kv_cache, wait_s=1.5)


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_a_share_that_no_replica_can_have_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="target_share must be above 0 and at most 1; found"):
        FollowWork(target_share=share)


@pytest.mark.parametrize("wait_s", [0, -1, float("inf"), float("nan")])
def test_a_wait_that_is_no_time_is_refused(wait_s: float) -> None:
    with pytest.raises(ValueError, match="target_wait_s must be a number of seconds above 0; found"):
        FollowWork(target_wait_s=wait_s)


def test_serve_carries_the_policy_by_value_and_calls_it_with_what_replicas_reported() -> None:
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"target_share": 0.5})
    told = {name: {"r0": value, "r1": value} for name, value in FULL._asdict().items()}
    told["wait_s"].pop("r1")  # has not reported all
    context = SimpleNamespace(aggregated_metrics=told, current_num_replicas=1, target_num_replicas=1)
    assert policy.get_policy()(**policy.policy_kwargs)(context) == (2, {})
    context.aggregated_metrics = None
    assert policy.get_policy()()(context) == (1, {})
