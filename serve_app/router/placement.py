"""Decides which replica computes which prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a replica stands when work is given out.

    work:     sequences it has, running and waiting, those of other routers included
    capacity: what its work is relative to; equal for equal machines
    """

    work: int
    capacity: int = 1


Policy = Callable[[Standing], float]


def least_relative_work(standing: Standing) -> float:
    """Key of the policy: the replica with the least work for its size comes first."""
    return standing.work / max(1, standing.capacity)


class Placement:
    """Gives prompts to replicas by a key function; equals take turns, also from one request to the next."""

    def __init__(self, policy: Policy = least_relative_work) -> None:
        self._policy = policy
        self._turn = 0

    def place(self, sizes: Sequence[int], standings: Sequence[Standing]) -> list[int]:
        """The index of a standing for each size (sequences of one prompt), counting what was just given."""
        planned = list(standings)
        chosen: list[int] = []
        for size in sizes:
            best = self._best(planned)
            planned[best] = replace(planned[best], work=planned[best].work + size)
            self._turn = best + 1
            chosen.append(best)
        return chosen

    def _best(self, standings: Sequence[Standing]) -> int:
        """The first by the policy; of equals, the one whose turn is next."""
        return min(
            range(len(standings)),
            key=lambda i: (self._policy(standings[i]), (i - self._turn) % len(standings)),
        )
