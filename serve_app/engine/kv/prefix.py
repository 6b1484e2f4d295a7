"""Which runs of tokens have known keys and values: hash chains over full blocks."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

Content = TypeVar("Content")

DIGEST_SIZE = 16


def block_hashes(token_ids: Sequence[int], block_size: int, *, salt: bytes) -> Iterator[bytes]:
    """Hash each full block of `token_ids` together with everything before it.

    Two blocks have the same hash only if the salt and all tokens up to the block's end are the same.
    """
    parent = blake2b(salt, digest_size=DIGEST_SIZE).digest()
    for end in range(block_size, len(token_ids) + 1, block_size):
        tokens = array("q", token_ids[end - block_size : end])
        parent = blake2b(parent + tokens.tobytes(), digest_size=DIGEST_SIZE).digest()
        yield parent


class PrefixIndex(Generic[Content]):
    """Contents of blocks by hash, the least recently used first to go."""

    def __init__(self) -> None:
        self._contents: OrderedDict[bytes, Content] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._contents

    def match(self, hashes: Iterator[bytes]) -> list[Content]:
        """Give the contents of the longest known run from the first hash on.

        Those used are marked as used, the run's beginning last, so that a chain is evicted from its end.
        """
        found: list[bytes] = []
        for block_hash in hashes:
            if block_hash not in self._contents:
                break
            found.append(block_hash)
        for block_hash in reversed(found):
            self._contents.move_to_end(block_hash)
        return [self._contents[block_hash] for block_hash in found]

    def add(self, block_hash: bytes, content: Content) -> None:
        self._contents[block_hash] = content

    def evict(self) -> None:
        """Drop the block that has been unused for longest."""
        self._contents.popitem(last=False)

    def clear(self) -> None:
        self._contents.clear()
