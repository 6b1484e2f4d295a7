"""The key/value store: blocks held by running sequences and cached blocks, within one budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice, tee

from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.kv.ledger import BlockLedger, block_hashes
from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.storage import Holding, Storage
from serve_app.engine.tensor_parallel.workers import ReplicatedStorage


class KeyValueStore:
    """Carries out on a storage what the ledger decides.

    num_places: sequences that may run at once;  num_spare: of these, such that are for few

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
        self._holdings: dict[int, Holding] = {}

    @property
    def has_common_place(self) -> bool:
        """Return whether any sequence may open."""
        return len(self._free_places) > self._num_spare

    @property
    def has_any_place(self) -> bool:
        """Return whether a sequence of a flow with less than its share may open."""
        return bool(self._free_places)

    @property
    def num_cached_blocks(self) -> int:
        return self._ledger.num_cached

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds; cached ones are not among them, but give way."""
        return self._ledger.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open(self) -> Holding:
        """Take the lowest free place, with nothing on it. Only where `has_any_place`."""
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
        """Give an empty holding the longest known run of `token_ids`; return how many tokens that are.

        The last token is never matched: its logits are needed. A block that a running sequence holds is shared.
        """
        assert not holding.blocks, "a prefix is matched first"
        hashes, names = tee(block_hashes(token_ids[:-1], self.block_size, salt=salt))
        holding.blocks = self._ledger.match(hashes)
        self._share(holding.blocks)
        holding.names = list(islice(names, len(holding.blocks)))
        return len(holding.blocks) * self.block_size

    def fork(self, parent: Holding, child: Holding, num_tokens: int) -> None:
        """Give an empty child the parent's first `num_tokens` positions. Only where `can_reserve` says so.

        Full blocks are shared. The last one is copied where it is not full, as both go on writing in it.
        """
        full = num_tokens // self.block_size
        child.blocks, child.names = parent.blocks[:full], parent.names[:full]
        self._share(child.blocks)
        if num_left := num_tokens % self.block_size:
            self._take(child, 1)
            self.storage.copy(parent.blocks[full], child.blocks[full], num_left)

    def publish(self, holding: Holding, token_ids: Sequence[int], *, salt: bytes) -> None:
        """Let others find the holding's full blocks. token_ids: its tokens whose keys and values are there and sound"""
        holding.names += block_hashes(token_ids, self.block_size, salt=salt, known=holding.names)
        parent = None
        for block, name in zip(holding.blocks, holding.names, strict=False):
            self._ledger.name(block, name, parent=parent)
            parent = name

    def close(self, holding: Holding) -> None:
        """Give the place back. Blocks that were published stay cached, the others are free."""
        freed = self._ledger.drop(holding.blocks)
        del self._holdings[holding.place]
        heappush(self._free_places, holding.place)
        holding.blocks, holding.names = [], []
        self.storage.discard(freed)

    def clear(self) -> None:
        """Forget every holding and every cached block."""
        for holding in list(self._holdings.values()):
            self.close(holding)
        self.storage.discard(self._ledger.forget_cached())

    def check_integrity(self, lengths: dict[int, int]) -> None:
        """Assert that blocks and places are conserved.

        lengths: computed tokens by place in use
        """
        places = sorted(self._holdings)
        assert sorted(lengths) == places, f"places {places} held, {sorted(lengths)} in use"
        assert len(self._free_places) + len(self._holdings) == self._num_places, "a place is lost"
        self._ledger.check_integrity(holding.blocks for holding in self._holdings.values())
        for place, length in lengths.items():
            held = len(self._holdings[place].blocks)
            assert self.blocks_for(length) <= held, f"place {place} holds {held} blocks for {length} tokens"

    def _take(self, holding: Holding, count: int) -> None:
        blocks = self._ledger.take(count)
        holding.blocks += blocks
        self.storage.claim(blocks)

    def _share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._ledger.share(block)


def make_store(config: EngineConfig, model: LoadedModel) -> KeyValueStore:
    """Make a store of as many blocks as the model's budget holds. All shards have a part of each block."""
    bytes_per_block = model.shape.bytes_per_token(model.dtype) * config.block_size
    num_blocks = model.kv_cache_bytes // bytes_per_block
    storage: Storage = PageStorage(
        model.shape,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=model.dtype,
        device=model.device,
        kernels=model.kernels,
        max_model_len=model.max_model_len,
    )
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
