"""Which single queries of a step begin with the same keys and values, and whether to attend to those in one product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_app.engine.kv.groups import CALL_POSITIONS, Reading

LEAST_GAIN = 4 * CALL_POSITIONS
"""Positions that must not be read again for one more product and one merge to pay (measured on CPUs, two rows and more
at 14 heads over 2 and at 4 over 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """Rows whose first `num_keys` positions are the same: computed of the same tokens, with the same adapters."""

    readings: tuple[Reading, ...]
    num_keys: int

    @property
    def gain(self) -> int:
        """Positions that are read for one row instead of each."""
        return (len(self.readings) - 1) * self.num_keys


def find_trunks(readings: Iterable[Reading], block_size: int) -> list[Trunk]:
    """Those that pay, none with a row of another. Names say it: a block's covers all that is before it."""
    alike = _alike([each for each in readings if each.length == 1 and len(each.names) * block_size <= each.start], 0)
    found = [trunk for some in alike for trunk in _best(some, block_size)]
    return [trunk for trunk in found if trunk.gain >= LEAST_GAIN]


def _best(readings: Sequence[Reading], block_size: int) -> list[Trunk]:
    """One trunk of all, or several longer ones of some, whichever is read less often; one block is common to all."""
    num_common = _num_common(readings)
    whole = Trunk(readings=tuple(readings), num_keys=num_common * block_size)
    parts = [trunk for some in _alike(readings, num_common) for trunk in _best(some, block_size)]
    return parts if sum(part.gain for part in parts) > whole.gain else [whole]


def _alike(readings: Sequence[Reading], at: int) -> list[list[Reading]]:
    """Those with the same name at a place, two and more at a time."""
    by_name: dict[bytes, list[Reading]] = {}
    for each in readings:
        if len(each.names) > at:
            by_name.setdefault(each.names[at], []).append(each)
    return [some for some in by_name.values() if len(some) > 1]


def _num_common(readings: Sequence[Reading]) -> int:
    """How many first blocks are common to all, one at least."""
    first, *others = (each.names for each in readings)
    low, high = 1, min(len(each.names) for each in readings)
    while low < high:
        middle = (low + high + 1) // 2
        if all(names[middle - 1] == first[middle - 1] for names in others):
            low = middle
        else:
            high = middle - 1
    return low
