"""Names the prefixes of a prompt before anybody has cut it into tokens, the same in every process."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

from serve_app.core.prompt import Image
from serve_app.core.request import GenerationRequest

BLOCK_BYTES = 256
"""Of the first blocks, about 64 tokens. Later ones grow with the prompt, so that a long one has few names too."""
GROWTH = 8
"""A block is at most this part of what stands before it."""
MAX_BYTES = 1 << 28
"""Of a prompt that are looked at."""
NAME_BYTES = 8


class Prefixes(NamedTuple):
    """What a router can tell of a prompt.

    num_bytes: of the whole prompt, token ids with four bytes each
    names:     of its first `ENDS[0]` bytes, its first `ENDS[1]` bytes and so on, as far as it reaches
    """

    num_bytes: int
    names: tuple[bytes, ...]


def prefixes_of(request: GenerationRequest) -> Prefixes:
    """Return the names of a prompt's prefixes; none where it may not use what was computed before.

    Two prompts share a name only if they agree up to its end, and may share keys and values: the base, the adapters'
    versions and the cache salt are in every name. A conversation counts with what its template gets.
    """
    content = b"".join(_pieces(request))
    if not request.uses_cache:
        return Prefixes(len(content), ())
    digest = sha256(f"{request.model.base}\n{request.model.salt}\n{request.cache_salt}\n".encode())
    names, begin = [], 0
    for end in ENDS[: bisect_right(ENDS, len(content))]:
        digest.update(content[begin:end])
        names.append(digest.copy().digest()[:NAME_BYTES])
        begin = end
    return Prefixes(len(content), tuple(names))


def _pieces(request: GenerationRequest) -> Iterator[bytes]:
    """Yield what the model reads, in its order; of an image its digest."""
    conversation = request.conversation
    if conversation is not None:
        yield conversation.source.encode("utf-8", "surrogatepass")
    for part in (*request.prompt.parts, *(() if conversation is None else conversation.images)):
        if isinstance(part, str):
            yield part.encode("utf-8", "surrogatepass")
        else:
            yield part.digest if isinstance(part, Image) else array("i", part).tobytes()
    if request.infill is not None:
        yield "\n".join(request.infill.texts).encode("utf-8", "surrogatepass")


def _ends() -> Iterator[int]:
    end = BLOCK_BYTES
    while end <= MAX_BYTES:
        yield end
        end += max(BLOCK_BYTES, end // GROWTH)


ENDS = tuple(_ends())
"""Bytes at which prefixes have names."""
