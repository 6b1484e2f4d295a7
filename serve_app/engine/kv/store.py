"""The key/value store: blocks held by running sequences and cached blocks, within one budget."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import compress, groupby, islice, takewhile, tee
from operator import itemgetter

from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.decoder.text_part import text_config
from serve_app.engine.kv.lanes import LaneStorage
from serve_app.engine.kv.ledger import BlockLedger, block_hashes
from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.storage import Holding, Storage
from serve_app.engine.tensor_parallel.workers import ReplicatedStorage
from serve_app.kernels.interface import attention_of_rows

logger = logging.getLogger(__name__)


class KeyValueStore:
    """Carries out on a storage what the ledger decides.

    num_places: sequences that may run at once;  num_spare: of these, such that are for few
    num_copied_tokens: positions copied from one place of memory to another so that a sequence can begin, ever since

    If a storage cannot share a block, the ledger gives the holding one of its own at once, and `fill` brings or copies
    the contents. They come from a holding that opened earlier, so the first unfilled one can always go on. `fill` also
    moves what is kept of a long closed holding. If somebody wants its place or its blocks, they are moved then.

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
        self._releases = DeferredReleases(storage, partial(heappush, self._free_places))
        self.num_copied_tokens = 0
        self._holdings: dict[int, Holding] = {}
        self._filling = Filling(storage, self._holdings, block_size)

    @property
    def has_common_place(self) -> bool:
        """Return whether any sequence may open."""
        return len(self._free_places) + len(self._releases) > self._num_spare

    @property
    def has_any_place(self) -> bool:
        """Return whether a sequence of a flow with less than its share may open."""
        return bool(self._free_places) or bool(self._releases)

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
        """Take the lowest free place, with nothing on it. Only where `has_any_place`."""
        if not self._free_places:
            self._settle(self._releases.finish_first)
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
        """Return whether a new holding could hold `num_tokens` now."""
        return self.blocks_for(num_tokens) <= self._ledger.num_available

    def match_prefix(self, holding: Holding, token_ids: Sequence[int], *, salt: bytes) -> int:
        """Give an empty holding the longest cached run of `token_ids`; return how many tokens that are.

        The last token is never matched: its logits are needed. A block that a running sequence holds is shared
        where the storage can, else copied. What is not shared is pending.
        """
        assert not holding.blocks, "a prefix is matched first"
        hashes, names = tee(block_hashes(token_ids[:-1], self.block_size, salt=salt))
        found = self._ledger.match(hashes)
        if not self._settle(partial(self._releases.finish, found)):
            found = []
        is_own = [self.storage.shares_held or not self._ledger.is_held(block) for block in found]
        self._share(compress(found, is_own))  # before any is taken, which could evict them
        count = self._affordable(is_own)
        self._ledger.drop(compress(found[count:], is_own[count:]))
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
        self._share(parent.blocks[:shared])
        child.blocks = parent.blocks[:shared]
        if missing := self.blocks_for(num_tokens) - shared:
            self._take(child, missing)
        child.pending = dict.fromkeys(range(shared, full), parent)
        if rest := num_tokens - full * self.block_size:
            self.storage.copy(parent, child, full * self.block_size, num_tokens)
            self.num_copied_tokens += rest
        child.names = parent.names[:full]

    def fill(self, most: int) -> None:
        """Copy up to `most` positions that are pending or kept, but a block at least, and no less than a piece."""
        left = max(1, most // self.block_size)
        if num_kept := self._releases.num_blocks:
            self._settle(partial(self._releases.advance, left // 2))
            left = max(1, left - num_kept + self._releases.num_blocks)
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
        if not at_once and not heirs and self._releases.takes(indices):
            del self._holdings[holding.place]
            self._releases.add(holding, len(indices))
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
        places = sorted(self._holdings)
        assert sorted(lengths) == places, f"places {places} held, {sorted(lengths)} in use"
        assert len(self._free_places) + len(self._releases) + len(self._holdings) == self._num_places, "a place is lost"
        self._ledger.check_integrity(holding.blocks for holding in self._holdings.values())
        for place, length in lengths.items():
            held = len(self._holdings[place].blocks)
            assert self.blocks_for(length) <= held, f"place {place} holds {held} blocks for {length} tokens"
        sources = [each for holding in self._holdings.values() for each in holding.pending.values() if each is not None]
        assert all(self._holdings.get(each.place) is each for each in sources), "what is to be copied is lost"

    def _settle(self, move: Callable[[], object]) -> bool:
        """Empty places. If that fails, return False, and forget everything that was cached."""
        try:
            move()
        except Exception:
            logger.exception("what is cached is lost, as it could not be moved")
            self._forget_cached()
            return False
        return True

    def _forget_cached(self, also: Iterable[int] = ()) -> None:
        self._releases.clear()
        self.storage.discard(sorted({*also, *self._ledger.forget_cached()}))

    def _take(self, holding: Holding, count: int) -> None:
        blocks = self._take_blocks(count)
        holding.blocks += blocks
        self.storage.claim(holding, blocks)

    def _take_blocks(self, count: int) -> list[int]:
        blocks, evicted = self._ledger.take(count)
        if evicted:
            self._releases.forget(evicted)
            self.storage.discard(evicted)
        return blocks

    def _share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._ledger.share(block)

    def _affordable(self, is_own: Sequence[bool]) -> int:
        """Return how many blocks from the first on can be had, if those that are not its own are taken anew."""
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
        """Return a holder of a block that was found by its name, which has the same index in every table."""
        return next(each for each in self._holdings.values() if each.blocks[index : index + 1] == [block])

    def _forget(self, holding: Holding) -> None:
        del self._holdings[holding.place]
        heappush(self._free_places, holding.place)
        holding.blocks, holding.pending = [], {}


@dataclass(slots=True, eq=False)
class _Release:
    """A closed holding. indices: rising, at least one, of its blocks that are cached and still at its place"""

    holding: Holding
    indices: list[int]

    @property
    def blocks(self) -> set[int]:
        return {self.holding.blocks[index] for index in self.indices}


class DeferredReleases:
    """Empties the places of closed holdings a few blocks at a time, the oldest first.

    The ledger counts their blocks as cached from the beginning, wherever the contents are. Before such a block is
    brought, its place is emptied; if it is evicted, its memory is given back where it is. A failure goes through, and
    then everything that is cached has to be forgotten.

    free: called with each place that is empty
    """

    def __init__(self, storage: Storage, free: Callable[[int], None]) -> None:
        self._storage = storage
        self._free = free
        self._releases: list[_Release] = []

    def __len__(self) -> int:
        """Return how many places are not empty yet."""
        return len(self._releases)

    @property
    def num_blocks(self) -> int:
        """Return how many blocks are still to be moved."""
        return sum(len(each.indices) for each in self._releases)

    def takes(self, indices: Sequence[int]) -> bool:
        """Return whether enough is kept of a holding to move it some at a time, with no free block in between."""
        storage, num_kept = self._storage, len(indices)
        return not storage.shares_held and num_kept > storage.piece_blocks and indices[-1] == num_kept - 1

    def add(self, holding: Holding, num_kept: int) -> None:
        """Release a holding's first `num_kept` blocks later, and give back the rest now."""
        self._storage.vacate(holding, num_kept)
        self._releases.append(_Release(holding, list(range(num_kept))))

    def advance(self, most: int) -> None:
        """Move up to `most` blocks, or a little more for whole pieces; a piece at least."""
        left = max(most, 1)
        while self._releases and left > 0:
            left -= self._move(self._releases[0], left)

    def finish_first(self) -> None:
        """Empty the oldest place."""
        self._finish(self._releases[0])

    def finish(self, blocks: Iterable[int]) -> None:
        """Empty the places that any of these blocks are still at."""
        wanted = set(blocks)
        for release in [each for each in self._releases if not wanted.isdisjoint(each.blocks)]:
            self._finish(release)

    def forget(self, blocks: Iterable[int]) -> None:
        """Give back the memory of evicted blocks; nothing of them is moved any more."""
        evicted = set(blocks)
        for release in [each for each in self._releases if not evicted.isdisjoint(each.blocks)]:
            holding = release.holding
            release.indices = [index for index in release.indices if holding.blocks[index] not in evicted]
            if release.indices:
                self._storage.vacate(holding, release.indices[-1] + 1)
            else:
                self._end(release)

    def clear(self) -> None:
        """Empty all places; nothing that was at one is kept."""
        while self._releases:
            self._end(self._releases[0])

    def _finish(self, release: _Release) -> None:
        while release in self._releases:
            self._move(release, len(release.indices))

    def _move(self, release: _Release, most: int) -> int:
        """Move whole pieces, as a storage gives back no less; return how many blocks."""
        piece, indices = self._storage.piece_blocks, release.indices
        end = (indices[0] + max(most, 1) + piece - 1) // piece * piece
        count = bisect_left(indices, end)
        self._storage.keep(release.holding, indices[:count])
        release.indices = indices[count:]
        if not release.indices:
            self._end(release)
        return count

    def _end(self, release: _Release) -> None:
        self._releases.remove(release)
        try:
            self._storage.vacate(release.holding)
        finally:
            self._free(release.holding.place)


@dataclass(slots=True)
class Filling:
    """Copies pending blocks. holdings: by place, in the order in which they were opened, as it is at each call"""

    storage: Storage
    holdings: Mapping[int, Holding]
    block_size: int

    @property
    def num_blocks(self) -> int:
        """That are pending."""
        return sum(len(holding.pending) for holding in self.holdings.values())

    def fill(self, most: int) -> int:
        """Copy up to `most` pending blocks; return how many.

        Half go to the first unfilled holding, the rest to those that miss least. So a short prefix does not wait for a
        long one, and a long one gets on however many short ones come.
        """
        left = most
        unfilled = [holding for holding in self.holdings.values() if holding.pending]
        if unfilled:
            first, *others = unfilled
            left -= self._fill(first, -(-left // 2))
            for holding in (*sorted(others, key=lambda each: len(each.pending)), first):
                left -= self._fill(holding, left)
        return most - left

    def fill_first(self) -> int:
        """Copy all that is pending of the first unfilled holding; return how many blocks."""
        unfilled = next((each for each in self.holdings.values() if each.pending), None)
        return 0 if unfilled is None else self._fill(unfilled, len(unfilled.pending))

    def _fill(self, holding: Holding, most: int) -> int:
        """Bring cached blocks and copy those of others, up to so many, in as few pieces as can be; return how many."""
        size = self.block_size
        some = list(takewhile(self._is_there, islice(holding.pending.items(), most)))
        for source, run in groupby(some, key=itemgetter(1)):
            indices = [index for index, _ in run]
            first, last = indices[0], indices[-1] + 1
            if source is None:
                self.storage.bring(holding, first, holding.blocks[first:last])
            else:
                self.storage.copy(source, holding, first * size, last * size)
        holding.pending = dict(islice(holding.pending.items(), len(some), None))
        return len(some)

    def _is_there(self, pending: tuple[int, Holding | None]) -> bool:
        """Return whether a block can be moved: the holding that it is copied from has it at its place by now."""
        index, source = pending
        assert source is None or self.holdings.get(source.place) is source, "what was to be copied is lost"
        return source is None or index < source.num_filled


def make_store(config: EngineConfig, model: LoadedModel) -> KeyValueStore:
    """Make a store of as many blocks as the model's budget holds. All shards have a part of each block."""
    bytes_per_block = model.shape.bytes_per_token(model.dtype) * config.block_size
    num_blocks = model.kv_cache_bytes // bytes_per_block
    storage = _make_storage(config, model, num_blocks)
    if model.workers is not None:
        storage = ReplicatedStorage(storage, model.workers.note)
    return KeyValueStore(
        storage,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_places=config.num_places,
        num_spare=config.num_spare_places,
        bytes_per_block=bytes_per_block * config.tensor_parallel,
    )


def _make_storage(config: EngineConfig, model: LoadedModel, num_blocks: int) -> Storage:
    if config.is_paged(model.device.type):
        return PageStorage(
            model.shape,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=model.dtype,
            device=model.device,
            kernels=model.kernels,
            max_model_len=model.max_model_len,
        )
    num_heads = getattr(text_config(model.module.config), "num_attention_heads", None)
    for layer in set(model.shape.layers):  # what attends on CPUs is made before a sequence waits for it
        if isinstance(num_heads, int) and layer.key_dim == layer.value_dim and num_heads % layer.heads == 0:
            attention_of_rows(num_heads // layer.heads, layer.key_dim, model.dtype)
    return LaneStorage(
        model.shape,
        num_lanes=config.num_places,
        max_model_len=model.max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=model.dtype,
    )
