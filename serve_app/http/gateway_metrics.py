"""What gateways and autoscalers read of a model server, under the names of vLLM's metrics.

Every router tells of all replicas that it reaches, as whoever asks it can reach them. So routers of one cluster tell
the same numbers, but for requests that wait in the router itself: take their maximum, not their sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.core.cards import ReplicaCard
from serve_app.core.delta import Load
from serve_app.router.admission import Admission
from serve_app.router.fleet import Fleet

Replicas = Sequence[tuple[ReplicaCard, Load]]
MODEL = "model_name"
LORA = (MODEL, "max_lora", "running_lora_adapters", "waiting_lora_adapters")
CACHE = (MODEL, "block_size", "num_gpu_blocks")


class GatewayMetrics(Collector):
    """One series per model and name, as the endpoint picker of a gateway reads the first one that it finds.

    admission: of the router, which knows what waits in it; None counts what waits in replicas alone
    clock:     Unix seconds
    """

    def __init__(
        self, fleet: Fleet, admission: Admission | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences that are queued.", labels=[MODEL])
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences that are computed.", labels=[MODEL])
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Part of the KV cache in use, 0 to 1.", labels=[MODEL])
        lora = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in slots, by name.", labels=LORA)
        cache = GaugeMetricFamily("vllm:cache_config_info", "Size of the KV cache.", labels=CACHE)
        rooms = self._fleet.rooms
        inside = {} if self._admission is None else self._admission.sequences
        by_model: dict[str, list[tuple[ReplicaCard, Load]]] = {name: [] for name in self._fleet.asleep}
        for card, load in self._fleet.replicas:
            by_model.setdefault(card.model.name, []).append((card, load))
        for model, replicas in sorted(by_model.items()):
            loads = [load for _, load in replicas]
            num_running = sum(load.num_running for load in loads)
            num_open = num_running + sum(load.num_waiting for load in loads)
            if model in rooms and model in inside:
                num_open = max(num_open, inside[model][0] + rooms[model].num_foreign)
            num_blocks = sum(load.num_blocks for load in loads)
            num_used = num_blocks - sum(load.num_free_blocks for load in loads)
            waiting.add_metric([model], num_open - num_running)
            running.add_metric([model], num_running)
            usage.add_metric([model], num_used / num_blocks if num_blocks else 0.0)
            num_slots = sum(card.residency.num_slots for card, _ in replicas)
            lora.add_metric([model, str(num_slots), ",".join(adapters_in_slots(replicas)), ""], self._clock())
            block_size = max((card.model.block_size for card, _ in replicas), default=0)
            cache.add_metric([model, str(block_size), str(num_blocks)], 1)
        yield from (waiting, running, usage, lora, cache)


def adapters_in_slots(replicas: Replicas) -> list[str]:
    """Return what clients write for each adapter that is resident on some replica, sorted."""
    names: set[str] = set()
    for card, _ in replicas:
        resident = frozenset(card.residency.versions)
        names |= {f"{card.model.name}:{each.name}" for each in card.model.adapters if each.version in resident}
    return sorted(names)
