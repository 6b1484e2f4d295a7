"""Sequences that wait to be computed, first come first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from serve_app.engine.sequence import Sequence


class WaitingQueue:
    """In the order in which they came; those sent back go to the front. The service bounds how many may come."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def push(self, sequence: Sequence) -> None:
        self._sequences[id(sequence)] = sequence

    def push_front(self, sequence: Sequence) -> None:
        """Put back a sequence that had its turn already."""
        self._sequences[id(sequence)] = sequence
        self._sequences.move_to_end(id(sequence), last=False)

    def take(self, sequence: Sequence) -> None:
        """Take out one that is in it, wherever it stands."""
        del self._sequences[id(sequence)]

    def remove(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out and return every sequence that `is_wanted` names."""
        removed = [sequence for sequence in self if is_wanted(sequence)]
        for sequence in removed:
            self.take(sequence)
        return removed
