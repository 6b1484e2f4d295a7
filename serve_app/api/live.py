"""The answer to GET /live: replicas and queues as a router knows them at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.api.forms.form import Schema
from serve_app.api.openapi_schemas import COUNT, NUMBER, STRING, array, record
from serve_app.core.cards import ReplicaCard
from serve_app.core.delta import Load

QUEUE: Schema = record({"id": STRING, "sequences": COUNT, "places": COUNT, "wait_s": NUMBER})
REPLICA: Schema = record(
    {
        "id": STRING,
        "model": STRING,
        "running": COUNT,
        "slots": COUNT,
        "waiting": COUNT,
        "blocks": COUNT,
        "blocks_used": COUNT,
        "blocks_cached": COUNT,
        "block_bytes": COUNT,
        "steps": COUNT,
        "step_seconds": NUMBER,
        "prefix_hit_tokens": COUNT,
        "preemptions": COUNT,
        "failures": COUNT,
        "completion_tokens": COUNT,
    }
)
LIVE: Schema = record(
    {
        "object": {"const": "live"},
        "router": STRING,
        "at": NUMBER,
        "requests": record({"open": COUNT, "limit": COUNT}),
        "refused": {"type": "object", "additionalProperties": COUNT},
        "models": array(QUEUE),
        "loading": array(STRING),
        "replicas": array(REPLICA),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What is inside of one model.

    sequences: of this router's requests;  places: for sequences, on all replicas
    wait_s:    how long a request that came now would wait for its first step
    """

    model: str
    sequences: int
    places: int
    wait_s: float

    def body(self) -> dict[str, object]:
        waited = round(self.wait_s, 3)
        return {"id": self.model, "sequences": self.sequences, "places": self.places, "wait_s": waited}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What one router knows.

    at:       Unix seconds
    num_open: requests being served, of so many at once
    refused:  requests refused at the door, by reason
    loading:  known models without a ready replica
    """

    router: str
    at: float
    num_open: int
    max_open: int
    refused: Mapping[str, int]
    queues: Sequence[Queue]
    loading: Sequence[str]
    replicas: Sequence[tuple[ReplicaCard, Load]]

    def body(self) -> dict[str, object]:
        return {
            "object": "live",
            "router": self.router,
            "at": round(self.at, 3),
            "requests": {"open": self.num_open, "limit": self.max_open},
            "refused": dict(self.refused),
            "models": [queue.body() for queue in self.queues],
            "loading": list(self.loading),
            "replicas": [_replica(card, load) for card, load in self.replicas],
        }


def _replica(card: ReplicaCard, load: Load) -> dict[str, object]:
    return {
        "id": card.replica_id,
        "model": card.model.name,
        "running": load.num_running,
        "slots": card.model.max_num_sequences,
        "waiting": load.num_waiting,
        "blocks": load.num_blocks,
        "blocks_used": load.num_blocks - load.num_free_blocks,
        "blocks_cached": load.num_cached_blocks,
        "block_bytes": load.block_bytes,
        "steps": load.num_steps,
        "step_seconds": round(load.step_s, 6),
        "prefix_hit_tokens": load.num_prefix_hit_tokens,
        "preemptions": load.num_preemptions,
        "failures": load.num_failures,
        "completion_tokens": load.num_generated,
    }
