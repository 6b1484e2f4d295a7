"""Tries adapters that were staged while the engine runs: each in a slot, between two steps, before names mean it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from serve_app.core.errors import EngineFailed, Overloaded
from serve_app.core.names import ModelRef
from serve_app.engine.lora.adapter import LowRank
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.engine.lora.slots import Slots

logger = logging.getLogger(__name__)

MOST_WAIT_S = 30.0
RETRY_S = 5
Weights = Mapping[str, LowRank]
"""By the module's name."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One adapter that is to be tried.

    model: that version alone;  slot: where it is pinned, None before it has one
    weights: as they were read;  done: is told how it went;  until: it waits for a slot
    """

    model: ModelRef
    weights: Weights
    done: Future[None]
    until: float
    slot: int | None = None


class Trials:
    """Trials that wait until their adapter is in its slot. All methods belong to the engine's thread.

    probe: computes with an adapter in a slot, and returns the reason to refuse it; None where it may be served
    """

    def __init__(
        self,
        slots: Slots,
        probe: Callable[[int, Weights], str | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = slots
        self._probe = probe
        self._clock = clock
        self._waiting: list[Trial] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def pinned(self) -> list[ModelRef]:
        """Adapters that are pinned for their trial."""
        return [trial.model for trial in self._waiting if trial.slot is not None]

    def begin(self, version: str, weights: Weights, done: Future[None]) -> None:
        """Have a known version tried as soon as it has a slot. `done` fails with Overloaded if it gets none in time."""
        model = ModelRef(base="", adapter=version, version=version)
        self._waiting.append(Trial(model=model, weights=weights, done=done, until=self._clock() + MOST_WAIT_S))
        self._take_slots()

    def advance(self) -> None:
        """Compute the trials whose adapter has come. `done` fails with AdapterRefused, which says why."""
        self._take_slots()
        left, self._waiting = self._waiting, []
        for trial in left:
            reason = self._slots.failed(trial.model)
            if trial.slot is None or (reason is None and not self._slots.is_ready(trial.model)):
                self._waiting.append(trial)
                continue
            reason = self._reason(trial.slot, trial) if reason is None else reason
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

    def _take_slots(self) -> None:
        """Send for adapters; the trial that waits takes a slot before sequences do that wait for one."""
        for trial in [each for each in self._waiting if each.slot is None]:
            if self._slots.can_acquire(trial.model):
                [(trial.slot, _)] = self._slots.acquire(trial.model)
            elif self._clock() > trial.until:
                self._waiting.remove(trial)
                message = "All adapters that fit at once are in use: `max_adapters` and `adapter_bytes` leave no room."
                trial.done.set_exception(Overloaded(message, None, {"retry_after_s": RETRY_S}))

    def _reason(self, slot: int, trial: Trial) -> str | None:
        try:
            return self._probe(slot, trial.weights)
        except Exception as error:  # whatever is wrong with one adapter, those that are served go on
            logger.exception("adapter version %s failed its trial", trial.model.version)
            return f"the model cannot be computed with it: {error}"
