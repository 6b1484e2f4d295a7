"""Brings and copies what holdings have in the books to where they read it, some of it at a time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, islice, takewhile
from operator import itemgetter

from serve_app.engine.kv.storage import Holding, Storage


class Filling:
    """holdings: by place, in the order in which they were opened, as it is at each call"""

    def __init__(self, storage: Storage, holdings: Mapping[int, Holding], block_size: int) -> None:
        self._storage = storage
        self._holdings = holdings
        self._block_size = block_size

    @property
    def num_blocks(self) -> int:
        """That are pending."""
        return sum(len(holding.pending) for holding in self._holdings.values())

    def fill(self, most: int) -> int:
        """Copy up to `most` pending blocks; how many.

        Half of them are the first one's that is not filled, then those come that miss least: so a short prefix does not
        wait for a long one, and a long one gets on however many short ones come.
        """
        left = most
        unfilled = [holding for holding in self._holdings.values() if holding.pending]
        if unfilled:
            first, *others = unfilled
            left -= self._fill(first, -(-left // 2))
            for holding in (*sorted(others, key=lambda each: len(each.pending)), first):
                left -= self._fill(holding, left)
        return most - left

    def fill_first(self) -> int:
        """Copy all that is pending of the first holding that is not filled; how many blocks."""
        unfilled = next((each for each in self._holdings.values() if each.pending), None)
        return 0 if unfilled is None else self._fill(unfilled, len(unfilled.pending))

    def _fill(self, holding: Holding, most: int) -> int:
        """Bring what is cached and copy what others have, of so many blocks, in as few pieces as can be; how many."""
        size = self._block_size
        some = list(takewhile(self._is_there, islice(holding.pending.items(), most)))
        for source, run in groupby(some, key=itemgetter(1)):
            indices = [index for index, _ in run]
            first, last = indices[0], indices[-1] + 1
            if source is None:
                self._storage.bring(holding, first, holding.blocks[first:last])
            else:
                self._storage.copy(source, holding, first * size, last * size)
        holding.pending = dict(islice(holding.pending.items(), len(some), None))
        return len(some)

    def _is_there(self, pending: tuple[int, Holding | None]) -> bool:
        """Whether a block can be moved: whom it is copied from has it at its place by now."""
        index, source = pending
        assert source is None or self._holdings.get(source.place) is source, "what was to be copied is lost"
        return source is None or index < source.num_filled
