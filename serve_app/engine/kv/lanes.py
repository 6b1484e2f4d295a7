"""Keys and values on contiguous lanes: one lane per running sequence, cached blocks in a pool beside them.

Attention over contiguous keys and values measured about twice as fast on CPUs as over gathered pages. Lanes and pool
are address space for the worst case, of which only what is used is committed: a block takes memory either in its
holder's lane or in the pool, never in both. So a hit moves blocks from the pool into the lane, and what is kept of a
sequence moves back when it ends; two running sequences cannot share a block and have a copy each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

import torch
from torch import Tensor

from serve_app.engine.attention import GroupedPlan
from serve_app.engine.cpu.rows_plan import RowsPlan
from serve_app.engine.kv.groups import Group, Reading, runs, tiles
from serve_app.engine.kv.memory import PAGE, Reservation
from serve_app.engine.kv.plan import AttentionPlan
from serve_app.engine.kv.shape import KeyValueShape
from serve_app.engine.kv.storage import Holding
from serve_app.engine.kv.trunks import find_trunks
from serve_app.engine.trunk_plan import TrunkPlan


@dataclass(frozen=True, slots=True)
class Part:
    """The keys, or the values, of one layer.

    lanes: [lanes, lane_length, heads, dim];  pool: [blocks, block_size, heads, dim], strided
    """

    lanes: Tensor
    pool: Tensor
    memory: Reservation

    def give_back(self, lane: int, num_positions: int) -> None:
        """Zero the lane's beginning, up to the end of a page: lanes share no page."""
        first = lane * self.lanes.stride(0) * self.lanes.itemsize
        size = num_positions * self.lanes.stride(1) * self.lanes.itemsize
        self.memory.give_back(first, first + -(-size // PAGE) * PAGE)


class LaneStorage:
    """A `Storage` for CPUs. Lanes that nobody is on hold zeros."""

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
    ) -> None:
        self.block_size = block_size
        self._lane_length = _lane_length(shape, max_model_len, block_size, dtype)
        self._block_bytes = shape.bytes_per_token(dtype) * block_size
        self._pool_memory = Reservation(self._block_bytes * num_blocks)
        pool = self._pool_memory.tensor((self._block_bytes * num_blocks // dtype.itemsize,), dtype)
        self._keys: list[Part] = []
        self._values: list[Part] = []
        offset = 0
        for layer in shape.layers:
            for parts, dim in ((self._keys, layer.key_dim), (self._values, layer.value_dim)):
                whole = (num_lanes, self._lane_length, layer.heads, dim)
                memory = Reservation(num_lanes * self._lane_length * layer.heads * dim * dtype.itemsize)
                strides = (self._block_bytes // dtype.itemsize, layer.heads * dim, dim, 1)
                blocks = torch.as_strided(pool, (num_blocks, block_size, layer.heads, dim), strides, offset)
                parts.append(Part(memory.tensor(whole, dtype), blocks, memory))
                offset += block_size * layer.heads * dim

    @property
    def _parts(self) -> list[Part]:
        return [*self._keys, *self._values]

    def bring(self, holding: Holding, first: int, blocks: Sequence[int]) -> None:
        ids = torch.tensor(blocks)
        begin, end = first * self.block_size, (first + len(blocks)) * self.block_size
        for part in self._parts:
            part.lanes[holding.place, begin:end].view(len(blocks), *part.pool.shape[1:]).copy_(part.pool[ids])
        self.discard(blocks)

    def copy(self, source: Holding, target: Holding, begin: int, end: int) -> None:
        for part in self._parts:
            part.lanes[target.place, begin:end].copy_(part.lanes[source.place, begin:end])

    def claim(self, holding: Holding, blocks: Sequence[int]) -> None:
        """Nothing: the rest of a lane is zeros."""

    def keep(self, holding: Holding, indices: Sequence[int]) -> None:
        if not indices:
            return
        ids = torch.tensor([holding.blocks[index] for index in indices])
        first, end = indices[0], indices[-1] + 1
        chosen = None if len(indices) == end - first else torch.tensor(indices) - first
        for part in self._parts:
            span = part.lanes[holding.place, first * self.block_size : end * self.block_size]
            blocks = span.view(end - first, *part.pool.shape[1:])
            part.pool.index_copy_(0, ids, blocks if chosen is None else blocks[chosen])

    def vacate(self, holding: Holding) -> None:
        length = len(holding.blocks) * self.block_size
        for part in self._parts:
            part.give_back(holding.place, length)

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
            part.lanes.view(-1, *part.lanes.shape[2:]).index_copy_(0, places, new)

    def read(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        assert isinstance(group.rows, tuple)
        lanes = slice(*group.rows)
        keys = slice(group.first_key, group.first_key + group.num_keys)
        return self._keys[layer].lanes[lanes, keys], self._values[layer].lanes[lanes, keys]

    def all_positions(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._keys[layer].lanes.flatten(0, 1), self._values[layer].lanes.flatten(0, 1)

    def first_position(self, place: int) -> int:
        return place * self._lane_length

    def read_place(self, layer: int, place: int, num_keys: int) -> tuple[Tensor, Tensor]:
        return self._keys[layer].lanes[place, :num_keys], self._values[layer].lanes[place, :num_keys]


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


def _lane_length(shape: KeyValueShape, max_model_len: int, block_size: int, dtype: torch.dtype) -> int:
    """Whole blocks, and whole pages of memory in every layer, so that lanes share no page."""
    unit = block_size
    for layer in shape.layers:
        for dim in (layer.key_dim, layer.value_dim):
            position_bytes = layer.heads * dim * dtype.itemsize
            unit = lcm(unit, PAGE // gcd(PAGE, position_bytes))
    return -(-max_model_len // unit) * unit


def _neighbours(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of blocks with neighbouring numbers, each from … to."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found
