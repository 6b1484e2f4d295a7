"""Counts and times what is served, and tells it with the loads of the replicas in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.paths import path_of
from serve_app.core.cards import ReplicaCard
from serve_app.core.delta import Load
from serve_app.core.ledger import FlowUsage
from serve_app.core.names import ModelRef
from serve_app.core.tenants import NOBODY
from serve_app.http.gateway_metrics import GatewayMetrics
from serve_app.router.admission import Admission, Reason
from serve_app.router.batch_worker import LINE_STATES, OUTCOMES
from serve_app.router.fleet import Fleet
from serve_app.router.rollout import DECISIONS
from serve_app.router.rollouts import Rollouts
from serve_app.router.run import Run
from serve_app.router.shadow import Outcome, Tally
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

NO_BATCHES: Mapping[str, int] = MappingProxyType({})

LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
GAUGES: dict[str, tuple[str, Callable[[ReplicaCard, Load], float | None]]] = {
    "sequences_running": ("Sequences in the batch.", lambda card, load: load.num_running),
    "sequences_waiting": ("Sequences queued.", lambda card, load: load.num_waiting),
    "blocks_free": (
        "Blocks of the key/value store that are free or only cached.",
        lambda card, load: load.num_free_blocks,
    ),
    "blocks": ("Blocks of the key/value store.", lambda card, load: load.num_blocks),
    "adapters_resident": ("Adapters in slots.", lambda card, load: len(card.residency.versions)),
    "adapter_slots": ("Slots for adapters.", lambda card, load: card.residency.num_slots),
    "adapter_bytes": ("Memory of adapters.", lambda card, load: card.residency.num_bytes),
    "adapter_budget_bytes": ("Memory that resident adapters may take.", lambda card, load: card.residency.max_bytes),
    "adapter_load_seconds": ("Mean time to bring an adapter into a slot.", lambda card, load: card.residency.load_s),
    "adapters_revision": (
        "Revision of the adapters that a replica serves.",
        lambda card, load: card.model.adapters_revision,
    ),
    "kept_streams": ("Streams that are kept for clients that lost them.", lambda card, load: card.kept.num_streams),
    "kept_bytes": ("Memory of kept streams, those that run included.", lambda card, load: card.kept.num_bytes),
    "flow_gap": ("Between the virtual counters of flows that wait.", lambda card, load: card.usage.gap),
}
TOTALS: dict[str, tuple[str, Callable[[ReplicaCard, Load], float | None]]] = {
    "steps": ("Engine steps.", lambda card, load: load.num_steps),
    "step_seconds": ("Time spent in engine steps.", lambda card, load: load.step_s),
    "preemptions": ("Sequences whose blocks were taken back.", lambda card, load: load.num_preemptions),
    "prefix_hit_tokens": ("Tokens whose prefix was cached.", lambda card, load: load.num_prefix_hit_tokens),
    "drafted_tokens": ("Guessed tokens that were computed.", lambda card, load: load.num_drafted_tokens),
    "accepted_tokens": ("Guessed tokens that were drawn.", lambda card, load: load.num_accepted_tokens),
    "adapter_loads": ("Adapters brought into a slot.", lambda card, load: card.residency.num_loads),
    "adapter_hits": ("Sequences that found their adapter in a slot.", lambda card, load: card.residency.num_hits),
    "forgotten_streams": ("Kept streams that gave way early.", lambda card, load: card.kept.num_forgotten),
    "idle_seconds": ("Time that is no flow's.", lambda card, load: card.usage.idle_ns / 1e9),
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
    """One router's numbers. Every series carries the router's id: a scrape reaches any one of several routers.

    revision: of the published adapters, as the router has heard of it
    batches:  lines of batches, by LINE_STATES and OUTCOMES
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        router_id: str = "router-0",
        admission: Admission | None = None,
        rollouts: Rollouts | None = None,
        revision: Callable[[], int] = int,
        tallies: Mapping[str, Tally] | None = None,
        batches: Mapping[str, int] = NO_BATCHES,
    ) -> None:
        self._router_id = router_id
        self._models: set[str] = set()
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests answered.", "route", "status", "model")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.", "model")
        self._cached_tokens = self._counter("cached_tokens", "Tokens of prompts that were cached.", "model")
        self._completion_tokens = self._counter("completion_tokens", "Tokens generated.", "model")
        self._moves = self._counter(
            "moved_prompts", "Prompts that went on at another replica, unnoticed by their clients.", "model"
        )
        self._resumed = self._counter("resumed_streams", "Streams that their clients fetched anew.", "model")
        self._pause_s = self._histogram(
            "move_pause_seconds", "From the loss of a replica to the next token from another.", LONG_S, "model"
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
        self._for_gateways = CollectorRegistry()
        for registry in (self._registry, self._for_gateways):
            registry.register(GatewayMetrics(fleet, admission))
        reads: list[Callable[[], Iterator[Family]]] = [partial(of_replicas, fleet), partial(scales, fleet)]
        reads += [partial(published, revision), partial(batch_lines, batches)]
        reads += [] if admission is None else [partial(admission_state, admission)]
        reads += [] if rollouts is None else [partial(rollout_state, rollouts)]
        reads += [] if tallies is None else [partial(shadow_totals, tallies)]
        for read in reads:
            self._registry.register(Series(router_id, read))

    async def answer(self, request: Request) -> Response:
        """Answer GET /metrics. Nobody, whom a router lets in for that (`gateway_metrics`), gets queues alone."""
        is_nobody = request.scope.get("state", {}).get("identity") is NOBODY
        shown = self._for_gateways if is_nobody else self._registry
        return Response(generate_latest(shown), headers={"content-type": CONTENT_TYPE})

    def note_request(self, path: str, served: Served, *, seconds: float) -> None:
        route = path_of(path) or OTHER
        models = [] if served.run is None else list(served.run.stats_by_model)
        model = SEVERAL if len(models) > 1 else "".join(map(self._label_of, models))
        self._requests.labels(self._router_id, route, str(served.status), model).inc()
        self._request_s.labels(self._router_id, route).observe(seconds)
        if served.run is not None:
            self._resumed.labels(self._router_id, model).inc(served.run.is_resumed)
            for ref, stats in served.run.stats_by_model.items():
                num_sequences = sum(request.n for request in served.run.requests if request.model == ref)
                self._note_model(self._label_of(ref), stats, num_sequences)

    def _note_model(self, model: str, stats: RunStats, num_sequences: int) -> None:
        labels, usage, past = (self._router_id, model), stats.usage, stats.past
        self._prompt_tokens.labels(*labels).inc(max(0, usage.prompt_tokens - past.prompt_tokens))
        self._cached_tokens.labels(*labels).inc(max(0, usage.cached_tokens - past.cached_tokens))
        self._completion_tokens.labels(*labels).inc(stats.num_generated)
        self._moves.labels(*labels).inc(stats.num_moves)
        for pause_s in stats.pauses_s:
            self._pause_s.labels(*labels).observe(pause_s)
        for queue_s in () if past.total_tokens else stats.queue_s:
            self._queue_s.labels(*labels).observe(queue_s)
        if past.total_tokens or not usage.completion_tokens:
            return  # of a stream that another router began, no times are known
        first_at, last_at = stats.shown_at
        self._first_s.labels(*labels).observe(first_at - stats.entered_at)
        self._decode_s.labels(*labels).observe(last_at - first_at)
        if (token_s := stats.token_s(num_sequences)) is not None:
            self._inter_token_s.labels(*labels).observe(token_s)

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


Sample = tuple[tuple[str, ...], float]
"""Values of the labels behind `router`, and the number."""


class Family(NamedTuple):
    """Samples of one metric with the names of their labels; a total only grows."""

    name: str
    text: str
    samples: Iterable[Sample]
    labels: tuple[str, ...] = ()
    is_total: bool = False


class Series(Collector):
    """Reads metrics when they are asked for: what a router no longer sees leaves no series behind."""

    def __init__(self, router_id: str, read: Callable[[], Iterator[Family]]) -> None:
        self._router_id = router_id
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for family in self._read():
            kind = CounterMetricFamily if family.is_total else GaugeMetricFamily
            metric = kind(f"serve_app_{family.name}", family.text, labels=("router", *family.labels))
            for values, number in family.samples:
                metric.add_metric((self._router_id, *values), number)
            yield metric


REPLICA = ("model", "replica")


def of_replicas(fleet: Fleet) -> Iterator[Family]:
    """Yield what replicas reported last, of themselves and of each flow. What they do not know has no series."""
    found = [((card.model.name, card.replica_id), card, load) for card, load in fleet.replicas]
    for is_total, table in ((False, GAUGES), (True, TOTALS)):
        for name, (text, value_of) in table.items():
            samples = [(of, each) for of, card, load in found if (each := value_of(card, load)) is not None]
            yield Family(f"replica_{name}", text, samples, REPLICA, is_total)
    memory = [
        ((*of, state), num_blocks * load.block_bytes)
        for of, _, load in found
        for state, num_blocks in _blocks_by_state(load).items()
        if num_blocks is not None
    ]
    yield Family("replica_kv_bytes", "Bytes of the key/value store.", memory, (*REPLICA, "state"))
    for name, (text, usage_of) in FLOW_TOTALS.items():
        flows = [((*of, usage.flow), usage_of(usage)) for of, card, _ in found for usage in card.usage.flows]
        yield Family(f"replica_flow_{name}", text, flows, (*REPLICA, "flow"), is_total=True)


def scales(fleet: Fleet) -> Iterator[Family]:
    """Yield how many replicas of each model are wanted, start and drain."""
    found = (((model, state), number) for model, each in fleet.scales.items() for state, number in asdict(each).items())
    yield Family("model_replicas", "Replicas that are wanted, start or drain.", found, ("model", "state"))


def published(revision: Callable[[], int]) -> Iterator[Family]:
    """Yield the revision of the published adapters that a router has heard of."""
    yield Family("adapters_revision", "Revision of the published adapters.", [((), revision())])


def admission_state(admission: Admission) -> Iterator[Family]:
    """Yield the state of admission."""
    most = admission.settings.max_open_requests
    yield Family("admission_requests_open", "Requests being served.", [((), admission.num_open)])
    yield Family("admission_requests_limit", "Requests served at once.", [((), most)])
    sequences = admission.sequences.items()
    inside = (((model,), num_inside) for model, (num_inside, _) in sequences)
    yield Family("admission_sequences", "Sequences let in.", inside, ("model",))
    places = (((model,), num_places) for model, (_, num_places) in sequences)
    yield Family("admission_places", "Sequences that replicas hold.", places, ("model",))
    waits = (((model,), wait_s) for model, wait_s in admission.predicted_waits_s.items())
    yield Family("admission_predicted_wait_seconds", "Wait of a request that comes now.", waits, ("model",))
    refusals = (((reason.value,), admission.refusals[reason]) for reason in Reason)
    yield Family("admission_refusals", "Requests refused at the door.", refusals, ("reason",), is_total=True)


def rollout_state(rollouts: Rollouts) -> Iterator[Family]:
    """Yield how many canaries there are, and what this router has decided about canaries."""
    yield Family("canaries", "Adapters of which a version is tried.", [((), rollouts.num_canaries)])
    yield Family("canaries_held", "Canaries that too few requests say something of.", [((), len(rollouts.held))])
    decisions = (((each,), rollouts.decisions[each]) for each in DECISIONS)
    yield Family("canary_decisions", "Canaries widened, rolled back or held.", decisions, ("decision",), is_total=True)


SHADOW_TOTALS: dict[str, tuple[str, Callable[[Tally], float]]] = {
    "first_token_seconds": ("Time to the first tokens of shadows, added up.", lambda tally: tally.first_token_s),
    "decode_seconds": ("Time from the first to the last tokens of shadows, added up.", lambda tally: tally.decode_s),
    "completion_tokens": ("Tokens that shadows generated.", lambda tally: tally.completion_tokens),
}


def shadow_totals(tallies: Mapping[str, Tally]) -> Iterator[Family]:
    """Yield what shadows came to, by the address that computed them."""
    outcomes = (
        ((model, outcome.value), tally.outcomes[outcome]) for model, tally in tallies.items() for outcome in Outcome
    )
    yield Family("shadow_requests", "Requests computed besides, unseen.", outcomes, ("model", "outcome"), is_total=True)
    for name, (text, value_of) in SHADOW_TOTALS.items():
        samples = (((model,), value_of(tally)) for model, tally in tallies.items())
        yield Family(f"shadow_{name}", text, samples, ("model",), is_total=True)


def batch_lines(tally: Mapping[str, int]) -> Iterator[Family]:
    """Yield how many lines of batches there are, as this router knows them."""
    lines = (((state,), tally.get(state, 0)) for state in LINE_STATES)
    yield Family("batch_lines", "Lines of batches without a result, and those computed here.", lines, ("state",))
    ended = (((outcome,), tally.get(outcome, 0)) for outcome in OUTCOMES)
    yield Family("batch_lines_ended", "Lines of batches with a result.", ended, ("outcome",), is_total=True)


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


def _blocks_by_state(load: Load) -> dict[str, int | None]:
    """Return the blocks by state. Cached blocks count as free too, as they give way."""
    return {"budget": load.num_blocks, "used": load.num_blocks - load.num_free_blocks, "cached": load.num_cached_blocks}
