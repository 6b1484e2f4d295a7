"""The block ledger: who holds which block, reference counts, prefix chains, and the order of eviction."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush


@dataclass(slots=True)
class NamedBlock:
    """A block whose tokens, and all tokens before them, are known by a hash.

    parent:  the hash of the block before it in its chain; None at the beginning
    used_at: the ledger's turn when it was last used
    """

    block: int
    parent: bytes | None
    used_at: int


class BlockLedger:
    """Counts blocks and knows prefixes; holds no tensor and does not know where a block's contents are.

    A block is free (nobody's), held (by one sequence or more), or cached: named, held by nobody, kept for later.
    Cached blocks give way when blocks are wanted: the chain that was unused for longest loses its last block first,
    so that what is left of a chain is always its beginning, which alone can be found again.

    Invariant: free + held + cached == num_blocks. Prefixes are found by hash, so the hashes must tell them apart.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))[::-1]
        self._num_holders: dict[int, int] = {}
        self._named: dict[bytes, NamedBlock] = {}
        self._name_of: dict[int, bytes] = {}
        self.num_cached = 0
        self._cached_children: dict[bytes, int] = {}  # by the hash of a block: how many cached ones go on from it
        self._leaves: list[tuple[int, bytes]] = []  # a heap by age; entries that no longer hold are passed over
        self._turn = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._num_holders)

    @property
    def num_available(self) -> int:
        """Return how many blocks `take` can give."""
        return len(self._free) + self.num_cached

    def take(self, count: int) -> list[int]:
        """Hold so many blocks that nobody holds, for one holder; cached ones give way. Only where they can be had."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        for _ in range(count - len(self._free)):
            self._evict()
        blocks = [self._free.pop() for _ in range(count)]
        self._num_holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known run from the first hash on, held by somebody or not; marks them as used."""
        self._turn += 1
        found: list[int] = []
        for name in hashes:
            known = self._named.get(name)
            if known is None:
                break
            known.used_at = self._turn
            found.append(known.block)
            self._push_if_leaf(name)
        return found

    def share(self, block: int) -> None:
        """Hold a named block once more."""
        holders = self._num_holders.get(block, 0)
        if holders == 0:
            self._note_cached(self._name_of[block], -1)
        self._num_holders[block] = holders + 1

    def name(self, block: int, name: bytes, *, parent: bytes | None) -> bool:
        """Make a held block known by a hash, its chain's former block by `parent`.

        False, and nothing is changed, where the hash is known already or the chain before it is not.
        """
        assert block in self._num_holders, f"block {block} is named but not held"
        if name in self._named or block in self._name_of or (parent is not None and parent not in self._named):
            return False
        self._named[name] = NamedBlock(block, parent, self._turn)
        self._name_of[block] = name
        return True

    def drop(self, blocks: Iterable[int]) -> list[int]:
        """Give up one hold on each. Returns those that are free from now on; named ones are cached."""
        self._turn += 1
        cached: list[int] = []
        freed: list[int] = []
        for block in blocks:
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            del self._num_holders[block]
            name = self._name_of.get(block)
            if name is None:
                self._free.append(block)
                freed.append(block)
            else:
                self._named[name].used_at = self._turn
                self._note_cached(name, +1)
                cached.append(block)
        for block in cached:
            self._push_if_leaf(self._name_of[block])
        return freed

    def forget_cached(self) -> list[int]:
        """Drop every cached block; those that are held keep no name either. Returns those that are free now."""
        freed = [known.block for known in self._named.values() if known.block not in self._num_holders]
        self._named.clear()
        self._name_of.clear()
        self._leaves.clear()
        self._cached_children.clear()
        self._free += freed
        self.num_cached = 0
        return freed

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that blocks are conserved; tables: the blocks of each holder."""
        holders: dict[int, int] = {}
        for table in tables:
            for block in table:
                holders[block] = holders.get(block, 0) + 1
        assert holders == self._num_holders, "blocks are held by others than the holders"
        cached = {block for block in self._name_of if block not in holders}
        assert len(cached) == self.num_cached, f"{len(cached)} cached blocks, {self.num_cached} counted"
        everything = [*self._free, *holders, *cached]
        assert len(everything) == len(set(everything)) == self.num_blocks, "blocks are lost, or there twice"
        children: dict[bytes, int] = {}
        for known in self._named.values():
            if known.block in cached and known.parent is not None:
                children[known.parent] = children.get(known.parent, 0) + 1
        assert children == self._cached_children, "children of cached blocks are miscounted"

    def _note_cached(self, name: bytes, change: int) -> None:
        """Count a block that becomes cached, or ceases to be, also for the block before it."""
        self.num_cached += change
        parent = self._named[name].parent
        if parent is None:
            return
        count = self._cached_children.get(parent, 0) + change
        if count:
            self._cached_children[parent] = count
            return
        del self._cached_children[parent]
        if parent in self._named:
            self._push_if_leaf(parent)

    def _is_leaf(self, name: bytes) -> bool:
        """Return whether a block is cached and no cached block follows it. If any is cached, some are leaves."""
        return name not in self._cached_children and self._named[name].block not in self._num_holders

    def _push_if_leaf(self, name: bytes) -> None:
        if not self._is_leaf(name):
            return
        heappush(self._leaves, (self._named[name].used_at, name))
        if len(self._leaves) > 64 + 4 * len(self._named):
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapify(self._leaves)

    def _is_current(self, entry: tuple[int, bytes]) -> bool:
        used_at, name = entry
        return name in self._named and self._named[name].used_at == used_at and self._is_leaf(name)

    def _evict(self) -> None:
        """Free the cached block that has been unused for longest among the last ones of their chains."""
        entry = heappop(self._leaves)
        while not self._is_current(entry):
            entry = heappop(self._leaves)
        name = entry[1]
        block = self._named[name].block
        self._note_cached(name, -1)
        del self._named[name]
        del self._name_of[block]
        self._free.append(block)


DIGEST_SIZE = 16


def block_hashes(
    token_ids: Sequence[int], block_size: int, *, salt: bytes, known: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """Hash each full block of `token_ids` together with everything before it.

    known: the hashes of its first blocks, where they have been taken already; they are not given again

    Two blocks have the same hash only if the salt and all tokens up to the block's end are the same.
    """
    parent = known[-1] if known else blake2b(salt, digest_size=DIGEST_SIZE).digest()
    for end in range((len(known) + 1) * block_size, len(token_ids) + 1, block_size):
        tokens = array("q", token_ids[end - block_size : end])
        parent = blake2b(parent + tokens.tobytes(), digest_size=DIGEST_SIZE).digest()
        yield parent
