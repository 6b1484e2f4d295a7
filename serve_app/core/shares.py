"""Whose a request is: its flow, weight and priority, and which flow's cache entry is evicted first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Priority = Literal["interactive", "standard", "batch"]
BATCH: Priority = "batch"
"""The class of what nobody waits for."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """All that the engine knows of a request's sender; it knows no tenants, keys or limits.

    flow:     requests of the same flow share what they get
    weight:   > 0; a flow with three times the weight of another gets three times as much while both want more
    priority: of this request; where not all can begin, interactive ones go before standard ones before batch
    """

    flow: str = "local"
    weight: float = 1.0
    priority: Priority = "standard"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry(Generic[Key]):
    """An entry of a cache that many flows share.

    flow:   the flow it was made for; others may find it too
    size:   in the unit of the cache's bound
    may_go: whether it may be evicted; False while it is being made
    """

    key: Key
    flow: str
    size: int
    may_go: bool = True


def next_to_evict(entries: Iterable[CacheEntry[Key]]) -> Key | None:
    """Return the least recently used entry of the flow that holds most; None if none of its entries may go.

    So no flow evicts the entries of others. entries: least recently used first
    """
    held, first = Counter[str](), dict[str, Key]()
    for each in entries:
        held[each.flow] += each.size
        if each.may_go:
            first.setdefault(each.flow, each.key)
    return first.get(max(held, key=lambda flow: held[flow])) if held else None
