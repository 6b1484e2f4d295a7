"""Counts and times what is served, and tells it with the loads of the replicas in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.core.cards import Residency
from serve_app.core.delta import Load
from serve_app.core.ledger import FlowUsage
from serve_app.core.names import ModelRef
from serve_app.http.routes import path_of
from serve_app.router.admission import Admission, Reason
from serve_app.router.fleet import Fleet
from serve_app.router.run import Run
from serve_app.router.stats import RunStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
"""Stands for paths that are none of ours, and for models beyond so many."""
SEVERAL = "several"
"""Stands for the models of a request that names more than one, where it counts as one request."""
MIXES = "*"
"""Stands for all mixes of a base's adapters; no adapter is called so."""
MAX_MODELS = 200
"""So many distinct names of models and adapters get a series of their own; all others share one."""

LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LOADS: dict[str, tuple[str, Callable[[Load], float]]] = {
    "sequences_running": ("Sequences in the batch.", lambda load: load.num_running),
    "sequences_waiting": ("Sequences queued.", lambda load: load.num_waiting),
    "blocks_free": ("Blocks of the key/value store that are free or only cached.", lambda load: load.num_free_blocks),
    "blocks": ("Blocks of the key/value store.", lambda load: load.num_blocks),
}
TOTALS: dict[str, tuple[str, Callable[[Load], float]]] = {
    "steps": ("Engine steps.", lambda load: load.num_steps),
    "step_seconds": ("Time spent in engine steps.", lambda load: load.step_s),
    "preemptions": ("Sequences whose blocks were taken back.", lambda load: load.num_preemptions),
    "prefix_hit_tokens": ("Tokens whose prefix was cached.", lambda load: load.num_prefix_hit_tokens),
    "drafted_tokens": ("Guessed tokens that were computed.", lambda load: load.num_drafted_tokens),
    "accepted_tokens": ("Guessed tokens that were drawn.", lambda load: load.num_accepted_tokens),
}
RESIDENCIES: dict[str, tuple[str, Callable[[Residency], float]]] = {
    "adapters_resident": ("Adapters in slots.", lambda found: len(found.versions)),
    "adapter_slots": ("Slots for adapters.", lambda found: found.num_slots),
    "adapter_bytes": ("Memory of adapters.", lambda found: found.num_bytes),
    "adapter_budget_bytes": ("Memory that resident adapters may take.", lambda found: found.max_bytes),
    "adapter_load_seconds": ("Mean time to bring an adapter into a slot.", lambda found: found.load_s),
}
RESIDENCY_TOTALS: dict[str, tuple[str, Callable[[Residency], float]]] = {
    "adapter_loads": ("Adapters brought into a slot.", lambda found: found.num_loads),
    "adapter_hits": ("Sequences that found their adapter in a slot.", lambda found: found.num_hits),
}
FLOW_TOTALS: dict[str, tuple[str, Callable[[FlowUsage], float]]] = {
    "seconds": ("Time of engine steps, divided by the rows of each flow.", lambda usage: usage.engine_ns / 1e9),
    "rows": ("Tokens that were computed for a flow.", lambda usage: usage.num_rows),
    "generated_tokens": ("Tokens that were generated for a flow.", lambda usage: usage.num_generated),
    "service": ("Weighted tokens and adapter swaps that a flow was charged.", lambda usage: usage.service),
}
"""Totals of the flows that a replica saw first; `*` stands for all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The outcome of a request for completions.

    status:   499 where the client left
    is_whole: nothing went wrong, not even within a stream
    """

    status: int
    run: Run | None
    is_whole: bool = True


class Metrics:
    """One router's numbers. Every series carries the router's id: a scrape reaches any one of several routers."""

    def __init__(self, fleet: Fleet, *, router_id: str = "router-0", admission: Admission | None = None) -> None:
        self._router_id = router_id
        self._models: set[str] = set()
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests answered.", "route", "status", "model")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.", "model")
        self._cached_tokens = self._counter("cached_tokens", "Tokens of prompts that were cached.", "model")
        self._completion_tokens = self._counter("completion_tokens", "Tokens generated.", "model")
        self._moves = self._counter(
            "moved_prompts", "Prompts given to another replica, unnoticed by their clients.", "model"
        )
        self._request_s = self._histogram("request_seconds", "From the request to its last byte.", LONG_S, "route")
        self._queue_s = self._histogram("queue_seconds", "A prompt's wait for its first step.", LONG_S, "model")
        self._first_s = self._histogram(
            "time_to_first_token_seconds", "From a completion's submission to its first token.", LONG_S, "model"
        )
        self._inter_token_s = self._histogram(
            "inter_token_seconds", "Mean time between the tokens of a completion.", SHORT_S, "model"
        )
        self._decode_s = self._histogram("decode_seconds", "From the first token to the last.", LONG_S, "model")
        self._registry.register(ReplicaLoads(fleet, router_id))
        self._registry.register(FlowUsages(fleet, router_id))
        if admission is not None:
            self._registry.register(AdmissionState(admission, router_id))

    async def answer(self, request: Request) -> Response:
        """Answer GET /metrics."""
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE})

    def note_request(self, path: str, served: Served, *, seconds: float) -> None:
        route = path_of(path) or OTHER
        models = [] if served.run is None else list(served.run.stats_by_model)
        model = SEVERAL if len(models) > 1 else "".join(map(self._label_of, models))
        self._requests.labels(self._router_id, route, str(served.status), model).inc()
        self._request_s.labels(self._router_id, route).observe(seconds)
        if served.run is not None:
            for ref, stats in served.run.stats_by_model.items():
                num_sequences = sum(request.n for request in served.run.requests if request.model == ref)
                self._note_model(self._label_of(ref), stats, num_sequences)

    def _note_model(self, model: str, stats: RunStats, num_sequences: int) -> None:
        labels, usage = (self._router_id, model), stats.usage
        self._prompt_tokens.labels(*labels).inc(usage.prompt_tokens)
        self._cached_tokens.labels(*labels).inc(usage.cached_tokens)
        self._completion_tokens.labels(*labels).inc(stats.num_generated)
        self._moves.labels(*labels).inc(stats.num_moves)
        for queue_s in stats.queue_s:
            self._queue_s.labels(*labels).observe(queue_s)
        if stats.first_event_at is None or stats.last_event_at is None:
            return
        decode_s = stats.last_event_at - stats.first_event_at
        if not usage.completion_tokens:
            return
        self._first_s.labels(*labels).observe(stats.first_event_at - stats.entered_at)
        self._decode_s.labels(*labels).observe(decode_s)
        if usage.completion_tokens > num_sequences:
            self._inter_token_s.labels(*labels).observe(
                decode_s * num_sequences / (usage.completion_tokens - num_sequences)
            )

    def _label_of(self, model: ModelRef) -> str:
        """Return the label of a model that exists; all mixes of a base share one."""
        name = f"{model.base}:{MIXES}" if model.mix else model.name
        if name not in self._models:
            if len(self._models) >= MAX_MODELS:
                return OTHER
            self._models.add(name)
        return name

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"serve_app_{name}", text, ("router", *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"serve_app_{name}", text, ("router", *labels), registry=self._registry, buckets=buckets)


class ReplicaLoads(Collector):
    """Collects the loads of the replicas that a router sees now; a replica that is gone leaves no series behind."""

    def __init__(self, fleet: Fleet, router_id: str) -> None:
        self._fleet = fleet
        self._router_id = router_id

    def collect(self) -> Iterator[Metric]:
        labels = ("router", "model", "replica")
        replicas = [((self._router_id, card.model.name, card.replica_id), load) for card, load in self._fleet.replicas]
        for name, (text, value_of) in LOADS.items():
            gauge = GaugeMetricFamily(f"serve_app_replica_{name}", text, labels=labels)
            for values, load in replicas:
                gauge.add_metric(values, value_of(load))
            yield gauge
        memory = GaugeMetricFamily(
            "serve_app_replica_kv_bytes", "Bytes of the key/value store.", labels=(*labels, "state")
        )
        for values, load in replicas:
            for state, num_blocks in _blocks_by_state(load).items():
                memory.add_metric((*values, state), num_blocks * load.block_bytes)
        yield memory
        for name, (text, value_of) in TOTALS.items():
            counter = CounterMetricFamily(f"serve_app_replica_{name}", text, labels=labels)
            for values, load in replicas:
                counter.add_metric(values, value_of(load))
            yield counter
        residencies = [
            ((self._router_id, card.model.name, card.replica_id), card.residency) for card, _ in self._fleet.replicas
        ]
        for family, table in ((GaugeMetricFamily, RESIDENCIES), (CounterMetricFamily, RESIDENCY_TOTALS)):
            for name, (text, found_of) in table.items():
                metric = family(f"serve_app_replica_{name}", text, labels=labels)
                for values, residency in residencies:
                    metric.add_metric(values, found_of(residency))
                yield metric


class FlowUsages(Collector):
    """Collects what the replicas that a router sees now have computed for each flow, as they last reported."""

    def __init__(self, fleet: Fleet, router_id: str) -> None:
        self._fleet = fleet
        self._router_id = router_id

    def collect(self) -> Iterator[Metric]:
        labels = ("router", "model", "replica")
        replicas = [
            ((self._router_id, card.model.name, card.replica_id), card.usage) for card, _ in self._fleet.replicas
        ]
        for name, (text, value_of) in FLOW_TOTALS.items():
            counter = CounterMetricFamily(f"serve_app_replica_flow_{name}", text, labels=(*labels, "flow"))
            for values, report in replicas:
                for usage in report.flows:
                    counter.add_metric((*values, usage.flow), value_of(usage))
            yield counter
        idle = CounterMetricFamily("serve_app_replica_idle_seconds", "Time that is no flow's.", labels=labels)
        gap = GaugeMetricFamily(
            "serve_app_replica_flow_gap", "Between the virtual counters of flows that wait.", labels=labels
        )
        for values, report in replicas:
            idle.add_metric(values, report.idle_ns / 1e9)
            gap.add_metric(values, report.gap)
        yield from (idle, gap)


class AdmissionState(Collector):
    """Collects the state of admission."""

    def __init__(self, admission: Admission, router_id: str) -> None:
        self._admission = admission
        self._router_id = router_id

    def collect(self) -> Iterator[Metric]:
        admission, labels = self._admission, ("router", "model")
        yield self._gauge("requests_open", "Requests being served.", admission.num_open)
        yield self._gauge("requests_limit", "Requests served at once.", admission.settings.max_open_requests)
        inside = GaugeMetricFamily("serve_app_admission_sequences", "Sequences let in.", labels=labels)
        places = GaugeMetricFamily("serve_app_admission_places", "Sequences that replicas hold.", labels=labels)
        for model, (num_inside, num_places) in admission.sequences.items():
            inside.add_metric((self._router_id, model), num_inside)
            places.add_metric((self._router_id, model), num_places)
        waits = GaugeMetricFamily(
            "serve_app_admission_predicted_wait_seconds", "Wait of a request that comes now.", labels=labels
        )
        for model, wait_s in admission.predicted_waits_s.items():
            waits.add_metric((self._router_id, model), wait_s)
        refusals = CounterMetricFamily(
            "serve_app_admission_refusals", "Requests refused at the door.", labels=("router", "reason")
        )
        for reason in Reason:
            refusals.add_metric((self._router_id, reason.value), admission.refusals[reason])
        yield from (inside, places, waits, refusals)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"serve_app_admission_{name}", text, labels=("router",))
        gauge.add_metric((self._router_id,), value)
        return gauge


class CountedRequests:
    """ASGI middleware that counts every request, whatever becomes of it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        state: dict[str, Any] = scope.setdefault("state", {})
        started_at = time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            served = state.get("served") or Served(status=status, run=None)
            self._metrics.note_request(scope["path"], served, seconds=time.monotonic() - started_at)


def _blocks_by_state(load: Load) -> dict[str, int]:
    """Return the blocks by state. Cached blocks count as free too, as they give way."""
    return {
        "budget": load.num_blocks,
        "used": load.num_blocks - load.num_free_blocks,
        "cached": load.num_cached_blocks,
    }
