"""Sequences that wait to be computed, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from serve_app.engine.sequence import Sequence


class WaitingQueue:
    """First in, first out; those sent back go to the front. The service bounds how many may come."""

    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)

    def push_front(self, sequence: Sequence) -> None:
        """Put back a sequence that had its turn already."""
        self._sequences.appendleft(sequence)

    def peek(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def pop(self) -> Sequence:
        return self._sequences.popleft()

    def remove(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Take out and return every sequence that `is_wanted` names."""
        removed = [sequence for sequence in self._sequences if is_wanted(sequence)]
        if removed:
            self._sequences = deque(sequence for sequence in self._sequences if not is_wanted(sequence))
        return removed
