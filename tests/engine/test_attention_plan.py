"""The seam of attention: a plan per step, a run of it per layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.decoder.runner import Runner
from serve_app.engine.kv.storage import AttentionPlan, Reading, Storage
from serve_app.engine.lora.pool import AdapterBank
from serve_app.kernels.forms import Scoring
from tests.engine.conftest import DEMO
from tests.engine.harness import complete, config, make_engine, request


@dataclass
class Watched:
    """A plan, and which layers it was run for."""

    plan: AttentionPlan
    layers: Counter[int]

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        self.layers[layer] += 1
        return self.plan.run(layer, query, key, value, scoring=scoring)


class WatchedStorage:
    """A storage that notes every plan it makes."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.plans: list[Watched] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)

    def plan(self, readings: Sequence[Reading], places: Tensor) -> Watched:
        self.plans.append(Watched(self._storage.plan(readings, places), Counter()))
        return self.plans[-1]


class WatchedRunner(Runner):
    def __init__(self, model: LoadedModel, storage: Storage, bank: AdapterBank) -> None:
        self.watched = WatchedStorage(storage)
        super().__init__(model, self.watched, bank)  # type: ignore[arg-type]


def test_a_step_is_planned_once_and_run_once_per_layer() -> None:
    engine = make_engine(config(DEMO), runner=WatchedRunner)
    complete(engine, [(request(f"{i}", max_tokens=4), list(range(40, 50 + 30 * i))) for i in range(3)])
    plans = engine._runner.watched.plans  # type: ignore[attr-defined]
    assert len(plans) == engine.num_steps > 4
    num_layers = len(engine.model.shape.layers)
    assert all(each.layers == Counter(range(num_layers)) for each in plans)
