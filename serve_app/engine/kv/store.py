"""The key/value store: blocks held by running sequences and cached blocks, within one budget."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import groupby, islice, takewhile, tee
from operator import itemgetter

from serve_app.engine.kv.ledger import BlockLedger, block_hashes
from serve_app.engine.kv.storage import Holding, Storage

logger = logging.getLogger(__name__)


class KeyValueStore:
    """Carries out on a storage what the ledger decides.

    num_places: sequences that may run at once;  num_spare: of these, such that are for few
    num_copied_tokens: positions copied from one place of memory to another so that a sequence can begin, ever since

    What a storage cannot share is a holding's in the ledger at once, and brought or copied by `fill`. What is pending
    is copied from who opened earlier, so the first one that is not filled can always go on. What is kept of a long
    holding that was closed is moved by `fill`, too, or when somebody wants its place or its blocks.

    Invariant: blocks held + blocks cached + blocks free == num_blocks, and what a storage keeps is no more.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        num_blocks: int,
        block_size: int,
        num_places: int,
        num_spare: int = 0,
        bytes_per_block: int = 0,
    ) -> None:
        self.storage = storage
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block
        self._ledger = BlockLedger(num_blocks)
        self._num_places = num_places
        self._num_spare = num_spare
        self._free_places = list(range(num_places))
        self._closings = Closings(storage, partial(heappush, self._free_places))
        self.num_copied_tokens = 0
        self._holdings: dict[int, Holding] = {}
        self._filling = Filling(storage, self._holdings, block_size)

    @property
    def has_free_place(self) -> bool:
        """For anybody."""
        return len(self._free_places) + len(self._closings) > self._num_spare

    @property
    def has_spare_place(self) -> bool:
        """For those at least who have less than their share."""
        return bool(self._free_places) or bool(self._closings)

    @property
    def num_cached_blocks(self) -> int:
        return self._ledger.num_cached

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds; cached ones are not among them, but give way."""
        return self._ledger.num_free

    @property
    def num_pending_tokens(self) -> int:
        """Positions that are still to be copied so that a sequence can begin."""
        return self._filling.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open(self) -> Holding:
        """Take the lowest free place, with nothing on it. Only where `has_spare_place`."""
        if not self._free_places:
            self._settle(self._closings.finish_first)
        holding = Holding(heappop(self._free_places))
        self._holdings[holding.place] = holding
        return holding

    def reserve(self, holding: Holding, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens; False (and nothing changed) where there is none."""
        missing = self.blocks_for(num_tokens) - len(holding.blocks)
        if missing <= 0:
            return True
        if missing > self._ledger.num_available:
            return False
        self._take(holding, missing)
        return True

    def can_reserve(self, num_tokens: int) -> bool:
        """Whether a new holding could hold `num_tokens` now."""
        return self.blocks_for(num_tokens) <= self._ledger.num_available

    def match_prefix(self, holding: Holding, token_ids: Sequence[int], *, salt: bytes) -> int:
        """Give an empty holding the longest cached run of `token_ids`; return how many tokens that are.

        The last token is never matched: its logits are needed. A block that a running sequence holds is shared
        where the storage can, else copied. What is not shared is pending.
        """
        assert not holding.blocks, "a prefix is matched first"
        hashes, names = tee(block_hashes(token_ids[:-1], self.block_size, salt=salt))
        found = self._ledger.match(hashes)
        if not self._settle(partial(self._closings.finish, found)):
            found = []
        is_own = [self.storage.shares_held or not self._ledger.is_held(block) for block in found]
        self._share(found, is_own)  # before any is taken, which could evict them
        count = self._affordable(is_own)
        self._ledger.drop(block for block, own in zip(found[count:], is_own[count:], strict=True) if own)
        copies = self._take_blocks(is_own[:count].count(False))
        holding.blocks = [block if own else copies.pop() for block, own in zip(found[:count], is_own, strict=False)]
        holding.names = list(islice(names, count))
        if not self.storage.shares_held:
            holders = [None if own else self._holder_of(found[i], i) for i, own in enumerate(is_own[:count])]
            holding.pending = dict(enumerate(holders))
        return count * self.block_size

    def fork(self, parent: Holding, child: Holding, num_tokens: int) -> None:
        """Give an empty child the parent's first `num_tokens` positions. Only where `can_reserve` says so.

        Full blocks are shared where the storage can, else pending; of the last one, in which both go on writing, the
        positions are copied now.
        """
        assert not parent.pending, "who is not filled computes nothing that others want"
        full = num_tokens // self.block_size
        shared = full if self.storage.shares_held else 0
        self._share(parent.blocks[:shared], [True] * shared)
        child.blocks = parent.blocks[:shared]
        missing = self.blocks_for(num_tokens) - shared
        if missing:
            self._take(child, missing)
        child.pending = dict.fromkeys(range(shared, full), parent)
        if rest := num_tokens - full * self.block_size:
            self.storage.copy(parent, child, full * self.block_size, num_tokens)
            self.num_copied_tokens += rest
        child.names = parent.names[:full]

    def fill(self, most: int) -> None:
        """Copy up to `most` positions that are pending or kept, but a block at least, and no less than a piece."""
        left = max(1, most // self.block_size)
        if num_kept := self._closings.num_blocks:
            self._settle(partial(self._closings.advance, left // 2))
            left = max(1, left - num_kept + self._closings.num_blocks)
        self.num_copied_tokens += self._filling.fill(left) * self.block_size

    def fill_first(self) -> bool:
        """Copy all that is pending of the first holding that is not filled; False where all are."""
        count = self._filling.fill_first()
        self.num_copied_tokens += count * self.block_size
        return count > 0

    def publish(self, holding: Holding, token_ids: Sequence[int], *, salt: bytes) -> None:
        """Let others find the holding's full blocks.

        token_ids: its tokens whose keys and values are computed and sound; what is pending of them is not named
        """
        size = self.block_size
        holding.names += block_hashes(token_ids, size, salt=salt, known=holding.names)
        parent = None
        for block, name in zip(holding.blocks[: holding.num_filled], holding.names, strict=False):
            self._ledger.name(block, name, parent=parent)
            parent = name

    def close(self, holding: Holding, *, at_once: bool = True) -> None:
        """Give the place back. Blocks that were published stay cached, the others are free and wiped.

        So do those that others were to copy from here, who bring them instead. Where the storage cannot keep them, the
        place is given back, nothing that is cached is found any more, and `fill` fails where it was to copy from here.

        at_once: else what stays cached is moved with the next `fill`s, where it is much
        """
        heirs = self._hand_on(holding)
        kept = {*self._drop(holding), *(holding.blocks[index] for index in heirs)}
        filled = holding.blocks[: holding.num_filled]
        indices = [index for index, block in enumerate(filled) if block in kept]
        if not at_once and not heirs and self._closings.takes(indices):
            del self._holdings[holding.place]
            self._closings.add(holding, len(indices))
            return
        try:
            self.storage.keep(holding, indices)
            for index, heir in heirs.items():
                heir.pending[index] = holding.pending.get(index)
        except Exception:
            self._forget_cached(kept)
            raise
        finally:
            self.storage.vacate(holding)
            self._forget(holding)

    def clear(self) -> None:
        """Forget every holding and every cached block."""
        for holding in list(self._holdings.values()):
            self._drop(holding)
            self.storage.vacate(holding)
            self._forget(holding)
        self._forget_cached()

    def check_integrity(self, lengths: dict[int, int]) -> None:
        """Assert that blocks and places are conserved.

        lengths: computed tokens by place in use
        """
        assert lengths.keys() == self._holdings.keys(), (
            f"places {sorted(self._holdings)} held, {sorted(lengths)} in use"
        )
        assert len(self._free_places) + len(self._closings) + len(self._holdings) == self._num_places, "a place is lost"
        self._ledger.check_integrity(holding.blocks for holding in self._holdings.values())
        for place, length in lengths.items():
            held = len(self._holdings[place].blocks)
            assert self.blocks_for(length) <= held, f"place {place} holds {held} blocks for {length} tokens"
        sources = [each for holding in self._holdings.values() for each in holding.pending.values() if each is not None]
        assert all(self._holdings.get(each.place) is each for each in sources), "what is to be copied is lost"

    def _settle(self, move: Callable[[], object]) -> bool:
        """Have places emptied; False where that fails, and nothing that was cached is found any more."""
        try:
            move()
        except Exception:
            logger.exception("what is cached is lost, as it could not be moved")
            self._forget_cached()
            return False
        return True

    def _forget_cached(self, also: Iterable[int] = ()) -> None:
        self._closings.clear()
        self.storage.discard(sorted({*also, *self._ledger.forget_cached()}))

    def _take(self, holding: Holding, count: int) -> None:
        blocks = self._take_blocks(count)
        holding.blocks += blocks
        self.storage.claim(holding, blocks)

    def _take_blocks(self, count: int) -> list[int]:
        blocks, evicted = self._ledger.take(count)
        if evicted:
            self._closings.forget(evicted)
            self.storage.discard(evicted)
        return blocks

    def _share(self, blocks: Sequence[int], is_own: Sequence[bool]) -> None:
        for block, own in zip(blocks, is_own, strict=True):
            if own:
                self._ledger.share(block)

    def _affordable(self, is_own: Sequence[bool]) -> int:
        """How many blocks from the first on can be had, where those that are not the holding's own are taken anew."""
        num_left = self._ledger.num_available
        for index, own in enumerate(is_own):
            if not own:
                if num_left == 0:
                    return index
                num_left -= 1
        return len(is_own)

    def _hand_on(self, source: Holding) -> dict[int, Holding]:
        """Give blocks that others were to copy from the source to the first of these, from whom the rest copy them.

        Returns who has got which, by index. Their contents are where they were: at the source's place, or cached.
        """
        heirs: dict[int, Holding] = {}
        for holding in self._holdings.values():
            for index in [index for index, each in holding.pending.items() if each is source]:
                if index in heirs:
                    holding.pending[index] = heirs[index]
                    continue
                heirs[index] = holding
                self._ledger.share(source.blocks[index])
                self._ledger.drop([holding.blocks[index]])
                holding.blocks[index] = source.blocks[index]
        return heirs

    def _drop(self, holding: Holding) -> list[int]:
        """Give up a hold on each of its blocks; returns those that are cached now. Contents of free ones are void."""
        cached, freed = self._ledger.drop(holding.blocks)
        unfetched = {holding.blocks[index] for index, source in holding.pending.items() if source is None}
        if void := unfetched.intersection(freed):
            self.storage.discard(sorted(void))
        return cached

    def _holder_of(self, block: int, index: int) -> Holding:
        """Who holds a block that is found by its name: it is the same one of every table that it stands in."""
        return next(each for each in self._holdings.values() if each.blocks[index : index + 1] == [block])

    def _forget(self, holding: Holding) -> None:
        del self._holdings[holding.place]
        heappush(self._free_places, holding.place)
        holding.blocks, holding.pending = [], {}


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
