"""The key/value store: what running sequences hold and what is cached, within one budget of blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import islice, tee

from serve_app.engine.kv.closings import Closings
from serve_app.engine.kv.filling import Filling
from serve_app.engine.kv.ledger import BlockLedger
from serve_app.engine.kv.prefix import block_hashes
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
