"""Attention over pages on CPUs: a kernel of our own for short spans, torch for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve_app.engine.kv.storage import Group, GroupedPlan, Reading, Slots, Storage, attend_to_groups
from serve_app.kernels.forms import Row, Scoring
from serve_app.kernels.interface import attention_of_rows

if TYPE_CHECKING:
    from serve_app.kernels.cpu.rows import RowsKernel, Table

SHORT = 8
"""Up to so many queries of one sequence in a step are the kernel's: a token and the guesses behind it."""


class RowsPlan:
    """An `AttentionPlan` on CPUs: our own kernel for short spans, torch for long prompts.

    A layer that the kernel does not know, with a cap, sinks or some sizes of heads, is torch's.

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
        self._ours = [each for each in readings if each.length <= SHORT]
        self._others: Sequence[Group] | None = None
        self._written: dict[int, Tensor] = {}
        self._read: dict[int, Tensor] = {}
        self._tables: dict[tuple[int | None, int | None], list[Table]] = {}
        self._by_torch: GroupedPlan | None = None

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._layers[layer]
        kernel = kernel_of(query, keys.flat, values.flat, scoring) if self._ours else None
        if kernel is None:
            return self._plan_of_torch().run(layer, query, key, value, scoring=scoring)
        if key is not None and value is not None:
            written = self._written_in(keys)
            keys.flat.index_copy_(0, written, key)
            values.flat.index_copy_(0, written, value)
        output, read = query.new_empty(query.shape), self._read_in(keys)
        for table in self._tables_for(kernel, scoring):
            kernel.run(query, keys.flat, values.flat, read, table, output, scale=scoring.scale)
        return attend_to_groups(self._storage, self._groups(), layer, query, scoring=scoring, output=output)

    def _written_in(self, slots: Slots) -> Tensor:
        """Return the slots of the step's tokens."""
        if slots.spacing not in self._written:
            self._written[slots.spacing] = slots.numbers(self._places)
        return self._written[slots.spacing]

    def _read_in(self, slots: Slots) -> Tensor:
        """Return the slots of what our readings see, whole blocks."""
        if slots.spacing not in self._read:
            size = self._block_size
            blocks = torch.tensor([block for each in self._ours for block in _blocks_of(each, size)])
            self._read[slots.spacing] = (blocks[:, None] * slots.spacing + torch.arange(size)).flatten()
        return self._read[slots.spacing]

    def _groups(self) -> Sequence[Group]:
        if self._others is None:
            self._others = self._groups_of([each for each in self._readings if each.length > SHORT])
        return self._others

    def _tables_for(self, kernel: RowsKernel, scoring: Scoring) -> list[Table]:
        name = scoring.window, scoring.chunk
        if name not in self._tables:
            rows = rows_of(self._ours, self._block_size, window=scoring.window, chunk=scoring.chunk)
            self._tables[name] = kernel.tables(rows)
        return self._tables[name]

    def _plan_of_torch(self) -> GroupedPlan:
        if self._by_torch is None:
            self._by_torch = GroupedPlan(self._storage, self._groups_of(self._readings), self._places)
        return self._by_torch


def kernel_of(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> RowsKernel | None:
    """The kernel for such a layer, if there is one."""
    if scoring.softcap is not None or scoring.sinks is not None or keys.shape != values.shape:
        return None
    if query.dtype != keys.dtype:
        return None
    heads, kv_heads = query.shape[1], keys.shape[1]
    return attention_of_rows(heads // kv_heads, query.shape[2], query.dtype) if heads % kv_heads == 0 else None


def rows_of(readings: Sequence[Reading], block_size: int, *, window: int | None, chunk: int | None) -> list[Row]:
    """Return each query with the keys that it sees, by their place among the slots of all blocks of the readings."""
    rows, first = [], 0
    for reading in readings:
        for number in range(reading.length):
            position, token = reading.start + number, reading.first_token + number
            in_window = 0 if window is None else position + 1 - window
            begin = max(0, in_window, 0 if chunk is None else position - position % chunk)
            rows.append(Row(token=token, position=first + begin, num_keys=position + 1 - begin))
        first += len(_blocks_of(reading, block_size)) * block_size
    return rows


def _blocks_of(reading: Reading, block_size: int) -> Sequence[int]:
    """Return the blocks that a reading sees."""
    return reading.blocks[: -(-reading.num_keys // block_size)]
