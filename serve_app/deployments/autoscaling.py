"""The autoscaling policy of models: how many replicas their work needs. Serve's controller calls it.

Serve counts calls, and a router has one open call to each replica however many requests there are. So a replica
reports its load (`Model.record_autoscaling_stats`), and this policy decides by that. Serve pickles this module by value
into its controller: it imports no module of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

POLICY = "serve_app.deployments.autoscaling:FollowWork"
"""What a cluster file names as `policy_function`."""


class Work(NamedTuple):
    """The load of one replica.

    sequences: that have not ended, running or queued, over those that it computes together
    kv_cache:  share of the KV cache that running sequences hold; cached prefixes count as free
    wait_s:    the longer of two: since when the oldest request waits for its first token, and until when the queued
               sequences have begun at the pace of the last endings
    """

    sequences: float
    kv_cache: float
    wait_s: float

    @property
    def share(self) -> float:
        """How full the replica is; above 1 where sequences are queued."""
        return max(self.sequences, self.kv_cache)


class FollowWork:
    """Wants as many replicas as keep each at a share of its capacity, and one more where requests wait too long.

    target_share:  of a replica's sequences or KV cache, whichever is fuller; above 0 and at most 1
    target_wait_s: a longer wait for the first token wants one more replica
    Raises ValueError for a value out of range.
    """

    def __init__(self, target_share: float = 0.7, target_wait_s: float = 2.0) -> None:
        if not 0 < target_share <= 1:
            raise ValueError(f"target_share must be above 0 and at most 1; found {target_share!r}")
        if not 0 < target_wait_s < math.inf:
            raise ValueError(f"target_wait_s must be a number of seconds above 0; found {target_wait_s!r}")
        self.target_share = target_share
        self.target_wait_s = target_wait_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many replicas are wanted, and no state. Serve applies delays and bounds to it."""
        told = works_of(context.aggregated_metrics or {})
        return self.wanted(told, num_running=context.current_num_replicas, num_now=context.target_num_replicas), {}

    def wanted(self, works: Sequence[Work], *, num_running: int, num_now: int) -> int:
        """Return how many replicas this work needs.

        works:       of the replicas that have reported
        num_running: replicas that run;  num_now: replicas that were wanted last
        """
        if not works:
            return num_now
        is_idle = all(each.sequences == 0 for each in works)
        needed = 0 if is_idle else max(1, math.ceil(sum(each.share for each in works) / self.target_share - 1e-9))
        if not is_idle and max(each.wait_s for each in works) > self.target_wait_s:
            needed = max(needed, num_running + 1)
        return max(needed, num_now) if len(works) < num_running or num_running < num_now else needed


def works_of(metrics: Mapping[str, Mapping[Any, float]]) -> list[Work]:
    """Return the work of each replica that has reported all of it; metrics are by name and then by replica."""
    found = [metrics.get(name, {}) for name in Work._fields]
    replicas = [each for each in found[0] if all(each in of_replicas for of_replicas in found)]
    return [Work(*(of_replicas[each] for of_replicas in found)) for each in replicas]
