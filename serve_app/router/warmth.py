"""Knows what replicas hold warm: prefixes by their names, and adapters. It may err; a reply is never wrong by that."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

from serve_app.core.cards import ReplicaCard, Residency
from serve_app.core.prefixes import ENDS

MAX_NAMES = 1 << 17
"""Of prefixes; about 20 MiB, and 6000 documents of 2000 tokens."""
MAX_GONE = 64
"""Replicas that left until the table is swept of them, which takes about 60 ms."""
LOAD_S = 0.2
"""An adapter's load takes so long, until a replica says how long its loads took."""


class Warmth:
    """What a router sent to replicas, and what they told it; the least recently used prefixes are forgotten.

    Each name has one bit per replica, and a replica that has a prefix has all shorter ones. So one walk along a
    prompt's names finds how much of it each replica holds.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._gone = 0  # bits of replicas that left, still in the table
        self._adapters: defaultdict[str, HeldAdapters] = defaultdict(HeldAdapters)

    @property
    def num_names(self) -> int:
        return len(self._holders)

    def hear(self, card: ReplicaCard) -> None:
        """Take in what a replica says: prefixes that other routers sent it, and its adapters."""
        self.hold(card.replica_id, card.prefixes)
        self._adapters[card.replica_id].hear(card.residency)

    def hold(self, replica_id: str, names: Sequence[bytes], versions: Iterable[str] = ()) -> None:
        """Note that a replica has these prefixes and adapter versions, or will have them when it has computed."""
        bit, holders = self._bit(replica_id), self._holders
        for name in reversed(names):  # a shorter prefix is forgotten after the longer ones
            holders[name] = holders.get(name, 0) | bit
            holders.move_to_end(name)
        while len(holders) > self._max_names:
            holders.popitem(last=False)
        if versions:
            self._adapters[replica_id].sent.update(versions)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        self._adapters.pop(replica_id, None)
        self._gone |= self._bits.pop(replica_id, 0)
        if self._gone.bit_count() >= MAX_GONE:
            left = ((name, holders & ~self._gone) for name, holders in self._holders.items())
            self._holders = OrderedDict((name, holders) for name, holders in left if holders)
            self._gone = 0

    def depths(self, names: Sequence[bytes], replica_ids: Sequence[str]) -> list[int]:
        """Return how many bytes of a prompt with these names each of the replicas holds."""
        levels: list[tuple[int, int]] = []  # whoever holds so many bytes, the deepest last
        holders = -1
        for name, end in zip(names, ENDS, strict=False):
            holders &= self._holders.get(name, 0)
            if not holders:
                break
            if levels and levels[-1][0] == holders:
                levels.pop()
            levels.append((holders, end))
        bits = [self._bits.get(replica_id, 0) for replica_id in replica_ids]
        return [next((end for holders, end in reversed(levels) if holders & bit), 0) for bit in bits]

    def load_s(self, replica_id: str, versions: Sequence[str]) -> float:
        """Return the seconds that loads of those adapters cost which the replica does not hold.

        Where all slots are taken, each load costs another one: somebody has to load what is evicted again.
        """
        return self._adapters[replica_id].load_s(versions) if versions else 0.0

    def _bit(self, replica_id: str) -> int:
        """Return the replica's bit; a new one gets the lowest that is free."""
        if replica_id not in self._bits:
            taken = sum(self._bits.values()) + self._gone
            self._bits[replica_id] = ~taken & (taken + 1)
        return self._bits[replica_id]


class HeldAdapters:
    """The adapters of one replica: as it told them last, and those sent since the card before that.

    What was sent while the last card was on its way is not on it.
    """

    def __init__(self) -> None:
        self._told = Residency()
        self._sent_before: set[str] = set()
        self.sent: set[str] = set()

    def hear(self, told: Residency) -> None:
        """Take over what the replica says now."""
        self._told, self._sent_before, self.sent = told, self.sent, set()

    def load_s(self, versions: Iterable[str]) -> float:
        """Return as `Warmth.load_s`."""
        held = {*self._told.versions, *self._sent_before, *self.sent}
        num_missing = sum(version not in held for version in versions)
        is_full = 0 < self._told.num_slots <= len(held)
        return num_missing * (self._told.load_s or LOAD_S) * (2 if is_full else 1)
