"""What the replicas of a model can hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Sequences that all open replicas of a model hold together.

    num_slots:   computed at once;  num_places: computed or queued
    num_foreign: held for other routers, as last heard of
    """

    num_slots: int
    num_places: int
    num_foreign: int = 0

    def __add__(self, other: Room) -> Room:
        return Room(
            num_slots=self.num_slots + other.num_slots,
            num_places=self.num_places + other.num_places,
            num_foreign=self.num_foreign + other.num_foreign,
        )
