"""Keys and values on contiguous lanes: one lane per running sequence, and a pool of cached blocks.

On CPUs attention over contiguous keys and values measured about twice as fast as over gathered pages. Lanes and pool
are address space for the worst case; only what is used takes memory. A block is either in its holder's lane or in the
pool:

1. a hit moves blocks from the pool to the lane, or copies those that another running sequence holds;
2. until then they are pending (`Holding.pending`);
3. when a sequence ends, what is kept of it moves back to the pool, a few blocks at a time.
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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.engine.kv.storage import (
    AttentionPlan,
    Group,
    GroupedPlan,
    Holding,
    KeyValueShape,
    Reading,
    attend,
    runs,
    tiles,
)
from serve_app.kernels.forms import Row, Scoring
from serve_app.kernels.interface import attention_of_rows

if TYPE_CHECKING:
    from serve_app.kernels.cpu.rows import RowsKernel, Table

PAGE = mmap.PAGESIZE
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
IS_LINUX = sys.platform == "linux"


class Reservation:
    """Address space for a tensor, all zeros; what is never written takes no memory.

    It asks for small pages, as a single position would commit two megabytes of large ones. Raises ModelNotSupported if
    the kernel does not promise so much.
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
        """Return a tensor over the beginning of the memory, which it keeps alive."""
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
        f"keys and values want {num_bytes >> 20} MiB of address space at once, and the kernel refuses it ({error};"
        f" vm.overcommit_memory is {rule}, and with 2 the kernel promises no more than there is). Only what is used"
        " takes memory. Lower max_num_sequences or max_model_len, or set vm.overcommit_memory to 0."
    )


MOVED_BYTES = 8 << 20
"""Of blocks that move between a lane and the pool, at most so much is in both."""


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
        self._layer_groups: dict[tuple[int, int], LayerGroup] = {}
        offset = 0
        for (heads, dim), num_parts in Counter(sizes).items():
            whole = (num_blocks, num_parts, block_size, heads, dim)
            strides = (self._block_bytes // dtype.itemsize, block_size * heads * dim, heads * dim, dim, 1)
            blocks = torch.as_strided(pool, whole, strides, offset)
            self._layer_groups[heads, dim] = LayerGroup.reserve((num_parts, num_lanes, self._lane_length), blocks)
            offset += num_parts * block_size * heads * dim
        parts = {size: iter(group.lanes) for size, group in self._layer_groups.items()}
        lanes = [next(parts[size]) for size in sizes]  # of each layer its keys, then its values
        self._keys, self._values = lanes[::2], lanes[1::2]

    def bring(self, holding: Holding, first: int, blocks: Sequence[int]) -> None:
        for at in range(0, len(blocks), self.piece_blocks):
            self._move_in(holding, first + at, blocks[at : at + self.piece_blocks])

    def copy(self, source: Holding, target: Holding, begin: int, end: int) -> None:
        for group in self._layer_groups.values():
            group.copy(source.place, target.place, begin, end)

    def claim(self, holding: Holding, blocks: Sequence[int]) -> None:
        """Nothing: the rest of a lane is zeros."""

    def keep(self, holding: Holding, indices: Sequence[int]) -> None:
        for _, some in groupby(indices, lambda index: index // self.piece_blocks):
            self._move_out(holding, list(some))

    def vacate(self, holding: Holding, first: int = 0) -> None:
        begin = -(-first // self._unit_blocks) * self._unit_blocks
        if begin < len(holding.blocks):
            for group in self._layer_groups.values():
                group.give_back(holding.place, begin * self.block_size, len(holding.blocks) * self.block_size)

    def discard(self, blocks: Sequence[int]) -> None:
        numbers = sorted(blocks)
        for each in stretches_of(numbers, numbers):
            self._pool_memory.give_back(each.block * self._block_bytes, (each.block + each.length) * self._block_bytes)

    def places(self, holding: Holding, begin: int, end: int) -> Sequence[int]:
        base = holding.place * self._lane_length
        return range(base + begin, base + end)

    def plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        return RowsPlan(self, readings, places)

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
        return self._keys[layer][lanes, : group.num_keys], self._values[layer][lanes, : group.num_keys]

    def all_positions(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return one layer's keys and values of all lanes, each [positions, heads, dim]."""
        return self._keys[layer].flatten(0, 1), self._values[layer].flatten(0, 1)

    def first_position(self, place: int) -> int:
        """Return the position, among those of all lanes, at which a place's lane begins."""
        return place * self._lane_length

    def _move_in(self, holding: Holding, first: int, blocks: Sequence[int]) -> None:
        """Move cached blocks from the pool to the lane, as the holding's from `first` on."""
        for stretch in stretches_of(range(first, first + len(blocks)), blocks):
            for group in self._layer_groups.values():
                group.move_in(holding.place, stretch)
        self.discard(blocks)

    def _move_out(self, holding: Holding, indices: Sequence[int]) -> None:
        """Move the blocks of these indices to the pool; the lane gives back all from where their pages begin."""
        for stretch in stretches_of(indices, [holding.blocks[index] for index in indices]):
            for group in self._layer_groups.values():
                group.move_out(holding.place, stretch)
        begin = indices[0] // self.piece_blocks * self.piece_blocks
        for group in self._layer_groups.values():
            group.give_back(holding.place, begin * self.block_size, (indices[-1] + 1) * self.block_size)


def _group_of(run: Sequence[Reading]) -> Group:
    """Return the single queries of all lanes from the run's first to its last; some lanes may have none."""
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
    """Return how many positions are whole blocks and, in every layer, whole pages, so that lanes share no page."""
    unit = block_size
    for layer in shape.layers:
        for dim in (layer.key_dim, layer.value_dim):
            position_bytes = layer.heads * dim * dtype.itemsize
            unit = lcm(unit, PAGE // gcd(PAGE, position_bytes))
    return unit


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks whose numbers go up by one as their indices on a lane do, from `index` and `block` on."""

    index: int
    block: int
    length: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The keys or values of all layers that have the same heads; each layer's keys, or values, are one part.

    lanes:  [parts, lanes, lane_length, heads, dim];  pool: [blocks, parts, block_size, heads, dim], strided
    memory: of the lanes, which share no page
    """

    lanes: Tensor
    pool: Tensor
    memory: Reservation

    @classmethod
    def reserve(cls, lanes: tuple[int, int, int], pool: Tensor) -> LayerGroup:
        """Reserve lanes for such a pool. lanes: parts, lanes of each, positions of each lane"""
        shape = (*lanes, *pool.shape[3:])
        memory = Reservation(prod(shape) * pool.itemsize)
        return cls(memory.tensor(shape, pool.dtype), pool, memory)

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        """Copy positions begin … end-1 from one lane to another."""
        self.lanes[:, target, begin:end].copy_(self.lanes[:, source, begin:end])

    def move_in(self, lane: int, stretch: Stretch) -> None:
        """Copy blocks of the pool to the lane."""
        self._on_lane(lane, stretch).copy_(self._in_pool(stretch))

    def move_out(self, lane: int, stretch: Stretch) -> None:
        """Copy blocks of the lane to the pool."""
        self._in_pool(stretch).copy_(self._on_lane(lane, stretch))

    def give_back(self, lane: int, begin: int, end: int) -> None:
        """Zero the lane's positions from `begin`, where a page begins, up to a page's end, and free the pages."""
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
    """Put the blocks that stand at these indices into as few stretches as can be."""
    found: list[Stretch] = []
    for index, block in zip(indices, blocks, strict=True):
        last = found[-1] if found else None
        if last is not None and (index - last.index, block - last.block) == (last.length, last.length):
            found[-1] = replace(last, length=last.length + 1)
        else:
            found.append(Stretch(index, block, 1))
    return found


SHORT = 8
"""Up to so many queries of one sequence in a step are the kernel's: a token and the guesses behind it."""


class RowsPlan:
    """An attention plan for lanes: our own kernel for short spans, torch for long prompts.

    A layer that the kernel does not know, with a cap, sinks or some sizes of heads, is torch's.
    """

    def __init__(self, storage: LaneStorage, readings: Sequence[Reading], places: Tensor) -> None:
        self._storage = storage
        self._places = places
        self._readings = readings
        self._ours = [each for each in readings if each.length <= SHORT]
        self._others: Sequence[Group] | None = None
        self._tables: dict[tuple[int | None, int | None], list[Table]] = {}
        self._by_torch: GroupedPlan | None = None

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._storage.all_positions(layer)
        kernel = kernel_of(query, keys, values, scoring)
        if kernel is None or not self._ours:
            return self._plan_of_torch().run(layer, query, key, value, scoring=scoring)
        if key is not None and value is not None:
            self._storage.write(layer, self._places, key, value)
        output = query.new_empty(query.shape)
        for table in self._tables_for(kernel, scoring):
            kernel.run(query, keys, values, table, output, scale=scoring.scale)
        for group in self._groups():
            keys, values = self._storage.read(layer, group)
            mask = group.mask(scoring.window, query.dtype, query.device, chunk=scoring.chunk)
            group.put(output, attend(group.queries(query), keys, values, mask=mask, scale=scoring.scale))
        return output

    def _groups(self) -> Sequence[Group]:
        if self._others is None:
            self._others = self._storage.groups([each for each in self._readings if each.length > SHORT])
        return self._others

    def _tables_for(self, kernel: RowsKernel, scoring: Scoring) -> list[Table]:
        name = scoring.window, scoring.chunk
        if name not in self._tables:
            rows = rows_of(self._storage, self._ours, window=scoring.window, chunk=scoring.chunk)
            self._tables[name] = kernel.tables(rows)
        return self._tables[name]

    def _plan_of_torch(self) -> GroupedPlan:
        if self._by_torch is None:
            self._by_torch = GroupedPlan(self._storage, self._storage.groups(self._readings), self._places)
        return self._by_torch


def kernel_of(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> RowsKernel | None:
    """The kernel for such a layer, if there is one."""
    if scoring.softcap is not None or scoring.sinks is not None or keys.shape != values.shape:
        return None
    if query.dtype != keys.dtype:
        return None
    heads, kv_heads = query.shape[1], keys.shape[1]
    return attention_of_rows(heads // kv_heads, query.shape[2], query.dtype) if heads % kv_heads == 0 else None


def rows_of(storage: LaneStorage, readings: Sequence[Reading], *, window: int | None, chunk: int | None) -> list[Row]:
    """Return each query with the keys that it sees."""
    rows = []
    for reading in readings:
        lane = storage.first_position(reading.place)
        for number in range(reading.length):
            position, token = reading.start + number, reading.first_token + number
            in_window = 0 if window is None else position + 1 - window
            begin = max(0, in_window, 0 if chunk is None else position - position % chunk)
            rows.append(Row(token=token, position=lane + begin, num_keys=position + 1 - begin))
    return rows
