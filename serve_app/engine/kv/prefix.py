"""Names runs of tokens: a chain of hashes over full blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

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
