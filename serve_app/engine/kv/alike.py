"""Keys and values of layers that are alike, on lanes and in the pool beside them; how blocks move between the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from serve_app.engine.kv.memory import PAGE, Reservation


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks whose numbers go up by one as their indices on a lane do, from `index` and `block` on."""

    index: int
    block: int
    length: int


@dataclass(frozen=True, slots=True)
class Alike:
    """Parts, which are the keys or the values of a layer each, of so many heads of one size.

    lanes:  [parts, lanes, lane_length, heads, dim];  pool: [blocks, parts, block_size, heads, dim], strided
    memory: of the lanes, which share no page
    """

    lanes: Tensor
    pool: Tensor
    memory: Reservation

    @classmethod
    def reserve(cls, lanes: tuple[int, int, int], pool: Tensor) -> Alike:
        """Lanes for such a pool: parts, how many each has, and how many positions each of these."""
        shape = (*lanes, *pool.shape[3:])
        memory = Reservation(prod(shape) * pool.itemsize)
        return cls(memory.tensor(shape, pool.dtype), pool, memory)

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        """Positions begin … end-1 from one lane to another."""
        self.lanes[:, target, begin:end].copy_(self.lanes[:, source, begin:end])

    def move_in(self, lane: int, stretch: Stretch) -> None:
        """Copy blocks of the pool to the lane."""
        self._on_lane(lane, stretch).copy_(self._in_pool(stretch))

    def move_out(self, lane: int, stretch: Stretch) -> None:
        """Copy blocks of the lane to the pool."""
        self._in_pool(stretch).copy_(self._on_lane(lane, stretch))

    def give_back(self, lane: int, begin: int, end: int) -> None:
        """Zero the lane's positions from `begin`, where a page begins, up to the end of a page."""
        size = self.lanes.stride(2) * self.lanes.itemsize
        num_bytes = -(-(end - begin) * size // PAGE) * PAGE
        for part in self.lanes:
            first = (part.storage_offset() + lane * part.stride(0)) * part.itemsize + begin * size
            self.memory.give_back(first, first + num_bytes)

    def _on_lane(self, lane: int, stretch: Stretch) -> Tensor:
        """[parts, blocks, block_size, heads, dim]"""
        parts, block_size, *sizes = self.pool.shape[1:]
        positions = self.lanes[:, lane, stretch.index * block_size : (stretch.index + stretch.length) * block_size]
        return positions.view(parts, stretch.length, block_size, *sizes)

    def _in_pool(self, stretch: Stretch) -> Tensor:
        """[parts, blocks, block_size, heads, dim]"""
        return self.pool[stretch.block : stretch.block + stretch.length].transpose(0, 1)


def stretches_of(indices: Sequence[int], blocks: Sequence[int]) -> list[Stretch]:
    """The blocks that stand at these indices, in as few stretches as can be."""
    found: list[Stretch] = []
    for index, block in zip(indices, blocks, strict=True):
        last = found[-1] if found else None
        if last is not None and (index - last.index, block - last.block) == (last.length, last.length):
            found[-1] = replace(last, length=last.length + 1)
        else:
            found.append(Stretch(index, block, 1))
    return found
