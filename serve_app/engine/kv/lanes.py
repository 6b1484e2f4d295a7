"""Keys and values on contiguous lanes: one lane per running sequence, and a pool of cached blocks.

Attention over contiguous keys and values measured about twice as fast on CPUs as over gathered pages. Lanes and pool
are address space for the worst case, of which only what is used is committed: a block takes memory either in its
holder's lane or in the pool, never in both. So a hit moves blocks from the pool into the lane, and what is kept of a
sequence moves back when it ends, a few at a time, so that no more than these are in both; two running sequences cannot
share a block and have a copy each. What is still to be moved to a holding's lane (`Holding.pending`) is in the pool, or
on another lane.
"""

from __future__ import annotations

import mmap
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd, lcm, prod
from pathlib import Path

import torch
from torch import Tensor

from serve_app.engine.decoder.attention import GroupedPlan
from serve_app.engine.decoder.errors import ModelNotSupported
from serve_app.engine.kv.lane_plans import RowsPlan, TrunkPlan, find_trunks
from serve_app.engine.kv.storage import AttentionPlan, Group, Holding, KeyValueShape, Reading, runs, tiles

PAGE = mmap.PAGESIZE
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
IS_LINUX = sys.platform == "linux"


class Reservation:
    """Address space for a tensor, all zeros; what is never written takes no memory.

    Small pages are asked for: with large ones a single position would commit two megabytes. Raises ModelNotSupported
    where so much is not promised.
    """

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        try:
            self._memory = mmap.mmap(-1, max(PAGE, -(-num_bytes // PAGE) * PAGE), flags=flags)
        except (OSError, OverflowError) as error:
            raise ModelNotSupported(_unpromised(num_bytes, error)) from error
        if IS_LINUX:
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the beginning of the memory, which it keeps alive."""
        return torch.frombuffer(self._memory, dtype=dtype, count=prod(shape)).view(shape)

    def give_back(self, begin: int, end: int) -> None:
        """Zero these bytes and return the memory of all pages that lie wholly within them."""
        first, last = -(-begin // PAGE) * PAGE, end // PAGE * PAGE
        if not IS_LINUX or first >= last:
            self._zero(begin, end)
            return
        self._zero(begin, first)
        self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        self._zero(last, end)

    def _zero(self, begin: int, end: int) -> None:
        if begin < end:
            torch.frombuffer(self._memory, dtype=torch.uint8, count=end - begin, offset=begin).zero_()


def _unpromised(num_bytes: int, error: Exception) -> str:
    try:
        rule = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip()
    except OSError:
        rule = "unknown"
    return (
        f"keys and values want {num_bytes >> 20} MiB of address space at once, of which only what is used takes memory,"
        f" and the kernel does not promise it ({error}; vm.overcommit_memory is {rule}, where 2 promises no more than"
        " there is). Lower max_num_sequences or max_model_len, or set vm.overcommit_memory to 0."
    )


MOVED_BYTES = 8 << 20
"""What blocks that move between a lane and the pool take twice at most."""


class LaneStorage:
    """A `Storage` for CPUs. Lanes that nobody is on hold zeros.

    moved_bytes: of blocks that move, so much may be in two places at once, or what fills whole pages in every layer
    """

    shares_held = False

    def __init__(
        self,
        shape: KeyValueShape,
        *,
        num_lanes: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        moved_bytes: int = MOVED_BYTES,
    ) -> None:
        self.block_size = block_size
        unit = _whole_pages(shape, block_size, dtype)
        self._lane_length = -(-max_model_len // unit) * unit
        self._block_bytes = shape.bytes_per_token(dtype) * block_size
        self._unit_blocks = unit // block_size
        num_units = max(1, moved_bytes // (self._block_bytes * self._unit_blocks))
        self.piece_blocks = num_units * self._unit_blocks
        self._pool_memory = Reservation(self._block_bytes * num_blocks)
        pool = self._pool_memory.tensor((self._block_bytes * num_blocks // dtype.itemsize,), dtype)
        sizes = [(each.heads, dim) for each in shape.layers for dim in (each.key_dim, each.value_dim)]
        self._alike: dict[tuple[int, int], Alike] = {}
        offset = 0
        for (heads, dim), num_parts in Counter(sizes).items():
            whole = (num_blocks, num_parts, block_size, heads, dim)
            strides = (self._block_bytes // dtype.itemsize, block_size * heads * dim, heads * dim, dim, 1)
            blocks = torch.as_strided(pool, whole, strides, offset)
            self._alike[heads, dim] = Alike.reserve((num_parts, num_lanes, self._lane_length), blocks)
            offset += num_parts * block_size * heads * dim
        parts = {size: iter(alike.lanes) for size, alike in self._alike.items()}
        lanes = [next(parts[size]) for size in sizes]  # of each layer its keys, then its values
        self._keys, self._values = lanes[::2], lanes[1::2]

    def bring(self, holding: Holding, first: int, blocks: Sequence[int]) -> None:
        for at in range(0, len(blocks), self.piece_blocks):
            self._move_in(holding, first + at, blocks[at : at + self.piece_blocks])

    def copy(self, source: Holding, target: Holding, begin: int, end: int) -> None:
        for alike in self._alike.values():
            alike.copy(source.place, target.place, begin, end)

    def claim(self, holding: Holding, blocks: Sequence[int]) -> None:
        """Nothing: the rest of a lane is zeros."""

    def keep(self, holding: Holding, indices: Sequence[int]) -> None:
        """In the place of what is on the lane, which is void behind it."""
        for _, some in groupby(indices, lambda index: index // self.piece_blocks):
            self._move_out(holding, list(some))

    def vacate(self, holding: Holding, first: int = 0) -> None:
        begin = -(-first // self._unit_blocks) * self._unit_blocks
        if begin < len(holding.blocks):
            for alike in self._alike.values():
                alike.give_back(holding.place, begin * self.block_size, len(holding.blocks) * self.block_size)

    def discard(self, blocks: Sequence[int]) -> None:
        for begin, end in _neighbours(blocks):
            self._pool_memory.give_back(begin * self._block_bytes, end * self._block_bytes)

    def places(self, holding: Holding, begin: int, end: int) -> Sequence[int]:
        base = holding.place * self._lane_length
        return range(base + begin, base + end)

    def plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        """By our own kernel where there is one: it reads every row's keys sooner than torch reads common ones once."""
        return RowsPlan(self, readings, places, by_torch=lambda: self.plan_by_torch(readings, places))

    def plan_by_torch(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        """Copies of a prefix are in the lane of each that has it; one of them is read."""
        if trunks := find_trunks(readings, self.block_size):
            return TrunkPlan(self, readings, trunks, places)
        return GroupedPlan(self, self.groups(readings), places)

    def groups(self, readings: Sequence[Reading]) -> list[Group]:
        found: list[Group] = []
        singles = sorted((each for each in readings if each.length == 1), key=lambda each: each.place)
        for run in runs(singles):
            found.append(_group_of(run))
        for reading in readings:
            if reading.length > 1:
                found += tiles(reading, (reading.place, reading.place + 1))
        return found

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        for part, new in ((self._keys[layer], key), (self._values[layer], value)):
            part.view(-1, *part.shape[2:]).index_copy_(0, places, new)

    def read(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        assert isinstance(group.rows, tuple)
        lanes = slice(*group.rows)
        keys = slice(group.first_key, group.first_key + group.num_keys)
        return self._keys[layer][lanes, keys], self._values[layer][lanes, keys]

    def all_positions(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._keys[layer].flatten(0, 1), self._values[layer].flatten(0, 1)

    def first_position(self, place: int) -> int:
        return place * self._lane_length

    def read_place(self, layer: int, place: int, num_keys: int) -> tuple[Tensor, Tensor]:
        return self._keys[layer][place, :num_keys], self._values[layer][place, :num_keys]

    def _move_in(self, holding: Holding, first: int, blocks: Sequence[int]) -> None:
        """Cached blocks, which the pool gives back, to the lane, as the holding's from `first` on."""
        for stretch in stretches_of(range(first, first + len(blocks)), blocks):
            for alike in self._alike.values():
                alike.move_in(holding.place, stretch)
        self.discard(blocks)

    def _move_out(self, holding: Holding, indices: Sequence[int]) -> None:
        """Blocks of these indices to the pool; the lane gives back all from where their pages begin."""
        for stretch in stretches_of(indices, [holding.blocks[index] for index in indices]):
            for alike in self._alike.values():
                alike.move_out(holding.place, stretch)
        begin = indices[0] // self.piece_blocks * self.piece_blocks
        for alike in self._alike.values():
            alike.give_back(holding.place, begin * self.block_size, (indices[-1] + 1) * self.block_size)


def _group_of(run: Sequence[Reading]) -> Group:
    """Single queries of lanes from the run's first to its last; lanes between that have none compute nothing."""
    first, last = run[0].place, run[-1].place
    by_lane = {reading.place: reading for reading in run}
    tokens = [by_lane[lane].first_token if lane in by_lane else run[0].first_token for lane in range(first, last + 1)]
    lies_together = tokens == list(range(tokens[0], tokens[0] + len(tokens)))
    filled = [lane - first for lane in by_lane]
    return Group(
        rows=(first, last + 1),
        tokens=(tokens[0], tokens[0] + len(tokens)) if lies_together else torch.tensor(tokens),
        filled=None if len(filled) == len(tokens) else torch.tensor(filled),
        length=1,
        num_keys=max(reading.num_keys for reading in run),
        starts=tuple(by_lane[lane].start if lane in by_lane else 0 for lane in range(first, last + 1)),
    )


def _whole_pages(shape: KeyValueShape, block_size: int, dtype: torch.dtype) -> int:
    """How many positions are whole blocks, and whole pages of memory in every layer, so that lanes share no page."""
    unit = block_size
    for layer in shape.layers:
        for dim in (layer.key_dim, layer.value_dim):
            position_bytes = layer.heads * dim * dtype.itemsize
            unit = lcm(unit, PAGE // gcd(PAGE, position_bytes))
    return unit


def _neighbours(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of blocks with neighbouring numbers, each from … to."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found


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
