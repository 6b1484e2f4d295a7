"""What one process knows of the divided model that it computes a part of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from serve_app.engine.tensor_parallel.crew import Crew
from serve_app.engine.tensor_parallel.division import Division
from serve_app.engine.tensor_parallel.sums import Sums


class Mates(Protocol):
    """The other shards, as a process that loads has them."""

    @property
    def number(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def sums(self) -> Sums: ...

    def meet(self) -> None:
        """Wait, without a bound, until all have come as far: to read weights takes its time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """crew: the first shard's followers; None where this is one of them"""

    division: Division
    sums: Sums
    crew: Crew | None
