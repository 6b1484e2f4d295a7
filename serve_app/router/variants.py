"""Draws one of several variants by weight, so that the same caller gets the same one again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

DIGEST_BYTES = 8


def share_of(*words: str) -> float:
    """Return a number in [0, 1) that these words always give, in this order; other words give an independent one.

    For shares that grow: who was below the smaller share is below the larger one, too.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for word in words:
        text = word.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8) + text)  # with its length, so that no bytes move from one to the next
    return (int.from_bytes(digest.digest()) >> 11) / 2**53


def in_order(weights: Mapping[str, float], *words: str) -> list[str]:
    """Return the variants as these words draw them: the first is theirs, each further one if those before it are gone.

    words: what is drawn for and who asks, such as an alias, a tenant and a `user`
    weights: finite, not negative; a variant of weight 0 is never drawn

    Over many words each variant comes first as often as its weight says. If weights change, nobody leaves a
    variant for one whose weight has grown less; the order of the mapping changes nothing. This is weighted
    rendezvous hashing: each variant has a draw of its own, and the least -ln(draw)/weight wins.
    """
    scores = {name: -math.log1p(-share_of(*words, name)) / weight for name, weight in weights.items() if weight > 0}
    return sorted(scores, key=lambda name: (scores[name], name))
