"""Routes a call to the replica it names, and a call that names none to the less busy of two.

Serve pickles this module by value into every process that calls a model, so at module level it imports nothing of
serve_app. Calls wait by their internal request id: two that share one must not wait at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import LocalityMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

MAX_LEAVING = 64


class PinnedRouter(LocalityMixin, RequestRouter):
    """A call made with `handle.options(session_id=<replica's unique id>)` goes to that replica or fails at once.

    A replica that is being stopped drains first and is no longer among the current ones; pinned calls still reach
    it, because routers renew leases and abort requests there until it ends.

    FIFOMixin is left out on purpose: with it any waiting call may be given the replica that another one chose.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leaving: dict[str, RunningReplica] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The named replica alone, or two of the nearest; the base class takes the one with the shorter queue."""
        if pending_request is None or not pending_request.metadata.session_id:
            return self._two_of_the_nearest(pending_request)
        wanted = pending_request.metadata.session_id
        pending_request.routing_context.should_backoff = True  # without it a full replica is asked in a busy loop
        replica = self._current(wanted)
        if replica is not None:
            return [[replica]]
        if not pending_request.future.done():
            pending_request.future.set_exception(_gone(wanted))
        return [candidate_replicas]  # not used, but only after a choice does the base class look at the future

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Refuse a call to a replica that is gone; Serve would have it wait for another one."""
        wanted = pending_request.metadata.session_id
        if wanted and self._current(wanted) is None:
            if wanted in self._leaving and not is_retry:
                return self._leaving[wanted]
            raise _gone(wanted)
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        before = dict(self.curr_replicas)
        super().update_replicas(list(replicas))
        for replica_id, replica in before.items():
            if replica_id not in self.curr_replicas:
                self._leaving[replica_id.unique_id] = replica
        while len(self._leaving) > MAX_LEAVING:
            del self._leaving[next(iter(self._leaving))]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._leaving.pop(replica_id.unique_id, None)

    def _current(self, unique_id: str) -> RunningReplica | None:
        return next((each for id_, each in self.curr_replicas.items() if id_.unique_id == unique_id), None)

    def _two_of_the_nearest(self, pending_request: PendingRequest | None) -> list[list[RunningReplica]]:
        nearest = list(self.apply_locality_routing(pending_request=pending_request))
        chosen = random.sample(nearest, k=min(2, len(nearest)))  # nosec B311 # no secret
        return [[self.curr_replicas[each] for each in chosen if each in self.curr_replicas]]


def _gone(unique_id: str) -> Exception:
    from serve_app.core.errors import ReplicaLost

    return ReplicaLost(f"Replica {unique_id} is gone.")
