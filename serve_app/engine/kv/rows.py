"""Attention over pages on CPUs: kernels of our own, torch for layers that they do not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from serve_app.engine.kv.storage import Group, GroupedPlan, Reading, Slots, Storage, attend_to_groups
from serve_app.kernels.forms import Row, Scoring, Stretch
from serve_app.kernels.interface import attention_kernels

if TYPE_CHECKING:
    from serve_app.kernels.cpu.rows import RowsKernel, Table
    from serve_app.kernels.cpu.tiles import Tiles, TilesKernel

Bounds: TypeAlias = tuple[int | None, int | None]
"""Window and chunk of a layer, as `Scoring` has them."""
SHORT = 8
"""Up to so many queries of one sequence in a step are single rows: a token and the guesses behind it."""


class RowsPlan:
    """An `AttentionPlan` on CPUs: a kernel of our own for short spans, another for prompts.

    A layer that they do not know, with a cap, sinks or some sizes of heads, is torch's. The two add up in different
    orders, so the last bits of a token depend on whether its sequence computes more than `SHORT` in the step.

    layers:    of each its keys and its values
    groups_of: what torch attends to in one call each
    """

    def __init__(
        self,
        storage: Storage,
        layers: Sequence[tuple[Slots, Slots]],
        readings: Sequence[Reading],
        places: Tensor,
        *,
        groups_of: Callable[[Sequence[Reading]], list[Group]],
    ) -> None:
        self._storage = storage
        self._layers = layers
        self._block_size = layers[0][0].pages.shape[1]
        self._groups_of = groups_of
        self._places = places
        self._readings = readings
        self._short = [each for each in readings if each.length <= SHORT]
        self._long = [each for each in readings if each.length > SHORT]
        self._others: Sequence[Group] | None = None
        self._written: dict[int, Tensor] = {}
        self._read: dict[int, Tensor] = {}
        self._stretches: dict[Bounds, list[Stretch]] = {}
        self._tables: dict[Bounds, list[Table]] = {}
        self._tiles: dict[Bounds, Tiles] = {}
        self._by_torch: GroupedPlan | None = None

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._layers[layer]
        rows, prompts = kernels_of(query, keys.flat, values.flat, scoring)
        if rows is None or not (prompts or self._short):
            return self._plan_of_torch().run(layer, query, key, value, scoring=scoring)
        if key is not None and value is not None:
            written = self._written_in(keys)
            keys.flat.index_copy_(0, written, key)
            values.flat.index_copy_(0, written, value)
        output, read = query.new_empty(query.shape), self._read_in(keys)
        for table in self._tables_for(rows, scoring) if self._short else ():
            rows.run(query, keys.flat, values.flat, read, table, output, scale=scoring.scale)
        if prompts is None:
            return attend_to_groups(self._storage, self._groups(), layer, query, scoring=scoring, output=output)
        if self._long:
            tiles = self._tiles_for(prompts, scoring)
            prompts.run(query, keys.flat, values.flat, read, tiles, output, scale=scoring.scale)
        return output

    def _written_in(self, slots: Slots) -> Tensor:
        """Return the slots of the step's tokens."""
        if slots.spacing not in self._written:
            self._written[slots.spacing] = slots.numbers(self._places)
        return self._written[slots.spacing]

    def _read_in(self, slots: Slots) -> Tensor:
        """Return the slots of what short readings see, and then long ones, whole blocks."""
        if slots.spacing not in self._read:
            size = self._block_size
            blocks = [block for each in (*self._short, *self._long) for block in _blocks_of(each, size)]
            self._read[slots.spacing] = (torch.tensor(blocks)[:, None] * slots.spacing + torch.arange(size)).flatten()
        return self._read[slots.spacing]

    def _groups(self) -> Sequence[Group]:
        if self._others is None:
            self._others = self._groups_of(self._long)
        return self._others

    def _tables_for(self, kernel: RowsKernel, scoring: Scoring) -> list[Table]:
        name = scoring.window, scoring.chunk
        if name not in self._tables:
            self._tables[name] = kernel.tables(rows_of(self._stretches_for(name)[: len(self._short)]))
        return self._tables[name]

    def _tiles_for(self, kernel: TilesKernel, scoring: Scoring) -> Tiles:
        name = scoring.window, scoring.chunk
        if name not in self._tiles:
            self._tiles[name] = kernel.tiles(self._stretches_for(name)[len(self._short) :])
        return self._tiles[name]

    def _stretches_for(self, bounds: Bounds) -> list[Stretch]:
        if bounds not in self._stretches:
            window, chunk = bounds
            both = (*self._short, *self._long)
            self._stretches[bounds] = stretches_of(both, self._block_size, window=window, chunk=chunk)
        return self._stretches[bounds]

    def _plan_of_torch(self) -> GroupedPlan:
        if self._by_torch is None:
            self._by_torch = GroupedPlan(self._storage, self._groups_of(self._readings), self._places)
        return self._by_torch


def kernels_of(
    query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> tuple[RowsKernel | None, TilesKernel | None]:
    """Return the kernels for such a layer, if there are any: of short spans, and of prompts."""
    if scoring.softcap is not None or scoring.sinks is not None or keys.shape != values.shape:
        return None, None
    heads, kv_heads = query.shape[1], keys.shape[1]
    if query.dtype != keys.dtype or heads % kv_heads:
        return None, None
    return attention_kernels(heads // kv_heads, query.shape[2], query.dtype)


def stretches_of(
    readings: Sequence[Reading], block_size: int, *, window: int | None, chunk: int | None
) -> list[Stretch]:
    """Return what each query sees; positions are among the slots of all blocks of the readings."""
    found, first = [], 0
    for reading in readings:
        bounds = []
        for position in range(reading.start, reading.num_keys):
            in_window = 0 if window is None else position + 1 - window
            in_chunk = 0 if chunk is None else position - position % chunk
            bounds.append((max(0, in_window, in_chunk), position + 1))
        found.append(Stretch(token=reading.first_token, position=first, bounds=bounds))
        first += len(_blocks_of(reading, block_size)) * block_size
    return found


def rows_of(stretches: Sequence[Stretch]) -> list[Row]:
    """Return each query with the keys that it sees."""
    return [
        Row(token=each.token + number, position=each.position + begin, num_keys=end - begin)
        for each in stretches
        for number, (begin, end) in enumerate(each.bounds)
    ]


def _blocks_of(reading: Reading, block_size: int) -> Sequence[int]:
    """Return the blocks that a reading sees."""
    return reading.blocks[: -(-reading.num_keys // block_size)]
