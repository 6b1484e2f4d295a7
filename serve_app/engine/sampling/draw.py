"""Random numbers that are functions of where they are used, so that a draw never depends on what else runs."""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SPREAD = 0xD1342543DE82EF95  # odd: no two counters meet


def uniform(seed: int, *, prompt_index: int, sample: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, decided by the four numbers alone.

    A chain of SplitMix64 finalisers (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    state = _mix(seed & MASK)
    for counter in (prompt_index, sample, position):
        state = _mix(state + counter * SPREAD)
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
