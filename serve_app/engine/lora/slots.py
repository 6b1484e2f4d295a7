"""Assigns adapters to slots: pinned while sequences use them, staged beside the steps, evicted when unused."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

from serve_app.core.cards import Residency
from serve_app.core.names import ModelRef
from serve_app.engine.lora.matching import AdapterRefused
from serve_app.engine.lora.plan import Mix

logger = logging.getLogger(__name__)

Load = Callable[[int, str], Callable[[], None] | None]


class Inline(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Slots:
    """Places for adapter versions. A pinned version stays; of the others the least recently used gives way.

    All methods belong to the engine's thread and none blocks. A version whose weights are still on their
    way has its slot already and may be pinned, but `is_ready` only after a `poll` found them there; one whose
    weights could not be read has `failed` from then on, until its last user lets go.

    load:      called in the executor with a slot and the version that moves into it; what it returns is called in
               the engine's thread, by `poll`
    vacate:    called with a slot that has changed hands, before `load`
    executor:  one thread, beside the engine's; None loads at once, within `acquire`
    on_staged: called in the executor's thread when there is something to poll
    fits:      whether versions may be resident together
    clock:     seconds, monotonic
    kept:      versions that give way last, as they can be read no more
    residency: which versions have a slot, and how long loads took; may be read by any thread
    """

    def __init__(
        self,
        num_slots: int,
        load: Load,
        *,
        vacate: Callable[[int], None] = lambda slot: None,
        executor: Executor | None = None,
        on_staged: Callable[[], None] = lambda: None,
        fits: Callable[[Iterable[str]], bool] = lambda versions: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._vacate = vacate
        self._executor = executor or Inline()
        self._on_staged = on_staged
        self._fits = fits
        self._clock = clock
        self.kept: frozenset[str] = frozenset()
        self._free = list(range(num_slots))[::-1]
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._pins: dict[str, int] = {}
        self._staging: dict[str, Future[Callable[[], None] | None]] = {}
        self._failed: dict[str, str] = {}
        self._sent_at: dict[str, float] = {}
        self._load_s = 0.0
        self.num_loads = self.num_hits = 0
        self.residency = Residency(num_slots=num_slots)

    def can_acquire(self, model: ModelRef) -> bool:
        """Whether `acquire` would succeed now."""
        wanted = {part.version for part in model.parts}
        if wanted <= self._slot_of.keys():
            return True
        busy = self._slot_of.keys() - self._idle().keys() | wanted
        fits = busy == wanted or self._fits(busy)  # what is larger than all bytes waits until nobody else has any
        return fits and len(busy) <= len(self._slot_of) + len(self._free)

    def acquire(self, model: ModelRef) -> Mix:
        """Pin every adapter of the model in a slot, sending for those that are not there; () for a base.

        All of them or none: only if `can_acquire`.
        """
        for part in model.parts:  # first, so that none of them gives way to another
            self._pins[part.version] = self._pins.get(part.version, 0) + 1
        for part in model.parts:
            if part.version not in self._slot_of:
                self._send_for(part.version)
            elif part.version not in self._staging:
                self.num_hits += 1
            self._slot_of.move_to_end(part.version)
        if isinstance(self._executor, Inline):
            self.poll()
        return tuple((self._slot_of[part.version], part.scale) for part in model.parts)

    def is_ready(self, model: ModelRef) -> bool:
        """Whether rows of this model can be computed, now that it is acquired."""
        return all(
            part.version in self._slot_of and part.version not in self._staging and part.version not in self._failed
            for part in model.parts
        )

    def failed(self, model: ModelRef) -> str | None:
        """Why an acquired model will never be ready; its users are to release it and end with an error."""
        reasons = [(part.adapter, self._failed[part.version]) for part in model.parts if part.version in self._failed]
        if not reasons:
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in reasons) if model.mix else reasons[0][1]

    def poll(self) -> bool:
        """Swap in what has been staged; whether anything became ready or failed. To be called before each step."""
        done = [version for version, future in self._staging.items() if future.done()]
        for version in done:
            self._settle(version, self._staging.pop(version))
        return bool(done)

    def release(self, model: ModelRef) -> None:
        """Undo one `acquire`."""
        for part in model.parts:
            self._pins[part.version] -= 1
            if not self._pins[part.version]:
                del self._pins[part.version]
                self._drop_if_failed(part.version)

    def evict(self, version: str) -> bool:
        """Take a version out of its slot unless it is in use; return whether it is in no slot now."""
        if version in self._idle():
            self._vacate_slot_of(version)
            self._note_residents()
        return version not in self._slot_of

    def check_integrity(self, users: Sequence[ModelRef]) -> None:
        """Assert that each slot has one owner and each pin one user."""
        taken = [*self._free, *self._slot_of.values()]
        assert len(set(taken)) == len(taken), f"a slot has two owners: {taken}"
        pins: dict[str, int] = {}
        for part in (part for model in users for part in model.parts):
            pins[part.version] = pins.get(part.version, 0) + 1
        assert pins == self._pins, f"pins {self._pins} for users {pins}"
        for version in (*self._staging, *self._failed):
            assert version in self._slot_of, f"{version} is on its way to no slot"
        assert self._failed.keys() <= pins.keys(), "a failed version keeps its slot without users"

    def _idle(self) -> dict[str, None]:
        """The versions that nobody pins and nobody is writing, the least recently used first, then those to be kept."""
        idle = [version for version in self._slot_of if version not in self._pins and version not in self._staging]
        return dict.fromkeys(sorted(idle, key=self.kept.__contains__))

    def _send_for(self, version: str) -> None:
        while not self._free or not self._fits((*self._slot_of, version)):
            oldest = next(iter(self._idle()), None)
            if oldest is None:
                break
            self._vacate_slot_of(oldest)
        assert self._free, "acquire() without can_acquire()"
        slot = self._free.pop()
        self._vacate(slot)
        self.num_loads += 1
        self._slot_of[version] = slot
        self._sent_at[version] = self._clock()
        self._note_residents()
        future = self._executor.submit(self._load, slot, version)
        self._staging[version] = future
        future.add_done_callback(lambda _: self._on_staged())

    def _vacate_slot_of(self, version: str) -> None:
        slot = self._slot_of.pop(version)
        self._vacate(slot)
        self._free.append(slot)

    def _settle(self, version: str, future: Future[Callable[[], None] | None]) -> None:
        error = future.exception()
        self._load_s += self._clock() - self._sent_at.pop(version)
        self._note_residents()
        if error is None:
            swap_in = future.result()
            if swap_in is not None:
                swap_in()
            return
        if not isinstance(error, AdapterRefused):
            logger.error("adapter version %s could not be staged", version, exc_info=error)
        self._failed[version] = str(error)
        self._drop_if_failed(version)

    def _drop_if_failed(self, version: str) -> None:
        """Give the slot of a version that failed back once nobody holds it, so that a later request tries anew."""
        if version in self._failed and version not in self._pins:
            del self._failed[version]
            self._free.append(self._slot_of.pop(version))
            self._note_residents()

    def _note_residents(self) -> None:
        """Replace `residency`, as other threads read it."""
        num_settled = self.num_loads - len(self._sent_at)
        load_s = self._load_s / num_settled if num_settled else None
        self.residency = replace(self.residency, versions=tuple(self._slot_of), load_s=load_s)
