"""Who sits in the bank: adapters resident in slots, pinned while sequences use them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from serve_app.core.names import ModelRef


class Slots:
    """Places for adapter versions. A pinned version stays; of the others the least recently used gives way.

    load: called with a slot and the version that moves into it
    """

    def __init__(self, num_slots: int, load: Callable[[int, str], None]) -> None:
        self._load = load
        self._free = list(range(num_slots))[::-1]
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._pins: dict[str, int] = {}

    @property
    def resident(self) -> tuple[str, ...]:
        return tuple(self._slot_of)

    def can_acquire(self, model: ModelRef) -> bool:
        """Whether `acquire` would succeed now."""
        if model.adapter is None or model.version in self._slot_of or self._free:
            return True
        return any(version not in self._pins for version in self._slot_of)

    def acquire(self, model: ModelRef) -> int:
        """Pin the model's adapter in a slot, moving it in first if need be; -1 for a base. Only if `can_acquire`."""
        if model.adapter is None:
            return -1
        version = model.version
        if version not in self._slot_of:
            slot = self._free.pop() if self._free else self._evict()
            self._load(slot, version)
            self._slot_of[version] = slot
        self._slot_of.move_to_end(version)
        self._pins[version] = self._pins.get(version, 0) + 1
        return self._slot_of[version]

    def is_ready(self, model: ModelRef) -> bool:
        """Whether the adapter that was acquired can be computed with."""
        return True

    def release(self, model: ModelRef) -> None:
        """Undo one `acquire`."""
        if model.adapter is None:
            return
        self._pins[model.version] -= 1
        if not self._pins[model.version]:
            del self._pins[model.version]

    def check_integrity(self, users: Sequence[ModelRef]) -> None:
        """Assert that each slot has one owner and each pin one user."""
        taken = [*self._free, *self._slot_of.values()]
        assert len(set(taken)) == len(taken), f"a slot has two owners: {taken}"
        pins: dict[str, int] = {}
        for model in users:
            if model.adapter is not None:
                pins[model.version] = pins.get(model.version, 0) + 1
        assert pins == self._pins, f"pins {self._pins} for users {pins}"

    def _evict(self) -> int:
        version = next(version for version in self._slot_of if version not in self._pins)
        return self._slot_of.pop(version)
