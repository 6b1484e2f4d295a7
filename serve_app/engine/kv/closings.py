"""Places whose sequences have ended, from which what is kept of them is moved a few blocks at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from serve_app.engine.kv.storage import Holding, Storage


@dataclass(slots=True, eq=False)
class _Closing:
    """indices: rising, at least one, of its blocks that are cached and still at its place"""

    holding: Holding
    indices: list[int]

    @property
    def blocks(self) -> set[int]:
        return {self.holding.blocks[index] for index in self.indices}


class Closings:
    """The oldest comes first. Blocks are cached by the ledger's books from the beginning, wherever their contents are.

    So whoever has such a block brought has its place emptied first, and one that is evicted is given back where it is.
    A failure goes through, and then everything that is cached has to be forgotten.

    free: called with each place that is empty
    """

    def __init__(self, storage: Storage, free: Callable[[int], None]) -> None:
        self._storage = storage
        self._free = free
        self._closings: list[_Closing] = []

    def __len__(self) -> int:
        """How many places are not empty yet."""
        return len(self._closings)

    @property
    def num_blocks(self) -> int:
        """That are still to be moved."""
        return sum(len(each.indices) for each in self._closings)

    def takes(self, indices: Sequence[int]) -> bool:
        """Whether so much is kept of a holding that it is moved some at a time, and none that is free lies between."""
        storage, num_kept = self._storage, len(indices)
        return not storage.shares_held and num_kept > storage.piece_blocks and indices[-1] == num_kept - 1

    def add(self, holding: Holding, num_kept: int) -> None:
        """What is behind its first `num_kept` blocks is given back now."""
        self._storage.vacate(holding, num_kept)
        self._closings.append(_Closing(holding, list(range(num_kept))))

    def advance(self, most: int) -> None:
        """Move up to `most` blocks, or a little more for whole pieces; a piece at least."""
        left = max(most, 1)
        while self._closings and left > 0:
            left -= self._move(self._closings[0], left)

    def finish_first(self) -> None:
        """Empty the oldest place."""
        self._finish(self._closings[0])

    def finish(self, blocks: Iterable[int]) -> None:
        """Empty the places that any of these blocks are still at."""
        wanted = set(blocks)
        for closing in [each for each in self._closings if not wanted.isdisjoint(each.blocks)]:
            self._finish(closing)

    def forget(self, blocks: Iterable[int]) -> None:
        """These have been evicted: nothing of them is moved any more, and what they take is given back."""
        evicted = set(blocks)
        for closing in [each for each in self._closings if not evicted.isdisjoint(each.blocks)]:
            holding = closing.holding
            closing.indices = [index for index in closing.indices if holding.blocks[index] not in evicted]
            if closing.indices:
                self._storage.vacate(holding, closing.indices[-1] + 1)
            else:
                self._end(closing)

    def clear(self) -> None:
        """Empty all places; nothing that was at one is kept."""
        while self._closings:
            self._end(self._closings[0])

    def _finish(self, closing: _Closing) -> None:
        while closing in self._closings:
            self._move(closing, len(closing.indices))

    def _move(self, closing: _Closing, most: int) -> int:
        """Whole pieces, as a storage gives back no less."""
        piece, indices = self._storage.piece_blocks, closing.indices
        end = (indices[0] + max(most, 1) + piece - 1) // piece * piece
        count = bisect_left(indices, end)
        self._storage.keep(closing.holding, indices[:count])
        closing.indices = indices[count:]
        if not closing.indices:
            self._end(closing)
        return count

    def _end(self, closing: _Closing) -> None:
        self._closings.remove(closing)
        try:
            self._storage.vacate(closing.holding)
        finally:
            self._free(closing.holding.place)
