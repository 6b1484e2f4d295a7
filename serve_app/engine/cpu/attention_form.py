"""Of what form the queries are that share a key head, and how far they are taken together."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.engine.cpu.emitter import Kind

BLOCK = 64
STRETCH = 512
"""Keys of an item, whole blocks."""
LINE = 64
"""Bytes that come from memory together."""
LEAST = -1e30
"""A score that no key has."""
MAX_UNROLLED = 64
"""Vectors of the query heads of one item."""
LEAST_SHARED = 4
"""Query heads from which on keys are turned into columns once for all, instead of summing each product across."""
TILE = 16
"""Queries of a prompt that attend together to keys that all of them see; a divisor of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """group: query heads that share a key head;  dim: of a head, whole vectors;  width: numbers of a vector
    registers: vectors that the CPU holds
    in_pairs: whether keys and queries are multiplied as pairs of bfloat16
    """

    group: int
    dim: int
    kind: Kind
    width: int
    registers: int
    in_pairs: bool

    @property
    def vectors(self) -> int:
        """Of a head."""
        return self.dim // self.width

    @property
    def parts(self) -> int:
        """Into how many items a group is divided, so that what is written out for each stays small."""
        fits = (part for part in range(1, self.group + 1) if self.group % part == 0)
        return next((part for part in fits if self.group // part * self.vectors <= MAX_UNROLLED), self.group)

    @property
    def heads(self) -> int:
        """Query heads of an item."""
        return self.group // self.parts

    @property
    def by_columns(self) -> bool:
        """Whether a product of a query and a key is added up in the order of a head's pairs."""
        return self.in_pairs and self.heads >= LEAST_SHARED

    @property
    def tile(self) -> int:
        """Queries that attend together, at most."""
        return TILE if self.by_columns else 1

    @property
    def widens_keys(self) -> bool:
        """Whether keys are made float32 once for all heads of an item, and not for each."""
        return self.kind != "float32" and not self.in_pairs and self.heads > 2

    @property
    def padded_heads(self) -> int:
        """Query heads of an item, in whole vectors."""
        return -(-self.heads // self.width) * self.width

    @property
    def partial(self) -> int:
        """Numbers that an item leaves: its sums of values, then largest scores and sums of weights of each head."""
        return self.heads * (self.dim + 2)
