"""Tries adapters that were staged while the engine runs: each in a slot, between two steps, before names mean it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from serve_app.core.errors import EngineFailed, Overloaded
from serve_app.core.names import ModelRef
from serve_app.engine.lora.adapter import LowRank
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.engine.lora.slots import Slots

logger = logging.getLogger(__name__)

RETRY_S = 5
Weights = Mapping[str, LowRank]
"""By the module's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """model: that version alone, pinned in the slot;  weights: as they were read;  done: is told how it went"""

    model: ModelRef
    slot: int
    weights: Weights
    done: Future[None]


class Trials:
    """Trials that wait until their adapter is in its slot. All methods belong to the engine's thread.

    probe: computes with an adapter in a slot, and returns the reason to refuse it; None where it may be served
    """

    def __init__(self, slots: Slots, probe: Callable[[int, Weights], str | None]) -> None:
        self._slots = slots
        self._probe = probe
        self._waiting: list[Trial] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def pinned(self) -> list[ModelRef]:
        """Adapters that are pinned for their trial."""
        return [trial.model for trial in self._waiting]

    def begin(self, version: str, weights: Weights, done: Future[None]) -> None:
        """Send for a known version. `done` fails with Overloaded while all slots or bytes are in use."""
        model = ModelRef(base="", adapter=version, version=version)
        if not self._slots.can_acquire(model):
            message = "All adapters that fit at once are in use: `max_adapters` and `adapter_bytes` leave no room."
            done.set_exception(Overloaded(message, None, {"retry_after_s": RETRY_S}))
            return
        [(slot, _)] = self._slots.acquire(model)
        self._waiting.append(Trial(model=model, slot=slot, weights=weights, done=done))

    def advance(self) -> None:
        """Compute the trials whose adapter has come. `done` fails with AdapterRefused, which says why."""
        left, self._waiting = self._waiting, []
        for trial in left:
            reason = self._slots.failed(trial.model)
            if reason is None and not self._slots.is_ready(trial.model):
                self._waiting.append(trial)
                continue
            reason = self._reason(trial) if reason is None else reason
            self._slots.release(trial.model)
            if reason is None:
                trial.done.set_result(None)
            else:
                trial.done.set_exception(AdapterRefused(reason))

    def close(self) -> None:
        """Fail what still waits."""
        for trial in self._waiting:
            trial.done.set_exception(EngineFailed("The engine has ended."))
        self._waiting.clear()

    def _reason(self, trial: Trial) -> str | None:
        try:
            return self._probe(trial.slot, trial.weights)
        except Exception as error:  # whatever is wrong with one adapter, those that are served go on
            logger.exception("adapter version %s failed its trial", trial.model.version)
            return f"the model cannot be computed with it: {error}"
