"""The seam between the ledger of blocks and the tensors that hold keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from serve_app.engine.kv.groups import Group, Reading
from serve_app.engine.kv.plan import AttentionPlan


@dataclass(slots=True, eq=False)
class Holding:
    """What one running sequence has of the store.

    place:   its number among those that run; the lowest free one when it came
    blocks:  its block table, a block per `block_size` positions
    names:   hashes of its first full blocks, as far as they were taken
    pending: by rising index, of which of its blocks the contents are not at its place yet, and where they are: with
             another holding, or None where they are cached; nothing is computed for it until there are none
    """

    place: int
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    pending: dict[int, Holding | None] = field(default_factory=dict)

    @property
    def num_filled(self) -> int:
        """How many of its first blocks are not pending."""
        return next(iter(self.pending), len(self.blocks))


class Storage(Protocol):
    """Keeps the contents of blocks, in a layout of its own, and reads and writes them for attention.

    The ledger decides which block is whose; a storage only carries that out. It zeroes what changes its owner:
    what a mask hides is still multiplied, by zero, and must be finite.

    shares_held:  whether two running sequences can read one block, and what is kept stays where it is
    piece_blocks: how many blocks, from a multiple of so many on, `keep` gives back by themselves
    """

    shares_held: bool
    piece_blocks: int

    def bring(self, holding: Holding, first: int, blocks: Sequence[int]) -> None:
        """Let the holding read these cached blocks, of which it holds the only hold, as its blocks from `first` on."""
        ...

    def copy(self, source: Holding, target: Holding, begin: int, end: int) -> None:
        """Copy positions begin … end-1 from one holding to the same positions of another."""
        ...

    def claim(self, holding: Holding, blocks: Sequence[int]) -> None:
        """Prepare blocks that the holding has just taken for writing; their former contents are void."""
        ...

    def keep(self, holding: Holding, indices: Sequence[int]) -> None:
        """Keep the contents of the holding's blocks of these (rising) indices beyond its end, which has come.

        Those that lie in a piece with them are kept in the same call, or not at all.
        """
        ...

    def vacate(self, holding: Holding, first: int = 0) -> None:
        """Give back what the holding's place has taken from its block `first` on, or where the next whole page of
        memory begins; what was not kept is void.
        """
        ...

    def discard(self, blocks: Sequence[int]) -> None:
        """Give back what cached blocks have taken."""
        ...

    def places(self, holding: Holding, begin: int, end: int) -> Sequence[int]:
        """Where positions begin … end-1 are written, one number per position, the same in all layers."""
        ...

    def plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        """Prepare one step's attention.

        readings: in the order of their tokens in the packed row;  places: [tokens], where those are written
        """
        ...

    def groups(self, readings: Sequence[Reading]) -> list[Group]:
        """Put readings together that can be attended to in one call.

        readings: in the order of their tokens in the packed row
        """
        ...

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write one layer's new keys and values; key, value: [tokens, heads, dim]."""
        ...

    def read(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        """One layer's keys and values of a group, each [rows, keys, heads, dim]."""
        ...
