"""A step's attention on a CPU: each query by itself, by a kernel of our own; long prompts in torch's operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serve_app.engine.cpu.rows import Row, RowsKernel, Table, rows_kernel, tables_of
from serve_app.engine.decoder.attention import attend
from serve_app.engine.kv.groups import Group, Reading
from serve_app.engine.kv.plan import AttentionPlan, Scoring
from serve_app.engine.kv.storage import Storage

SHORT = 8
"""Queries of one sequence in a step that are the kernel's whatever they see: a token and the guesses behind it."""


class Lanes(Storage, Protocol):
    """A storage where the positions of a sequence lie one behind the other, in whole blocks."""

    block_size: int

    def all_positions(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values of all lanes, each [positions, heads, dim]."""
        ...

    def first_position(self, place: int) -> int:
        """Of a place's lane among all."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Attending:
    """How all of a step's queries are attended to by one call in every layer of one scoring.

    places:      [tokens] int64, where keys and values are written
    is_decoding: whether each sequence has one query, so that the call writes what is new in passing
    """

    kernel: RowsKernel
    table: Table
    storage: Lanes
    places: Tensor
    is_decoding: bool


class RowsPlan:
    """A plan for lanes. What the kernel does not know, a cap, sinks, some sizes of heads, is torch's."""

    def __init__(
        self, storage: Lanes, readings: Sequence[Reading], places: Tensor, *, by_torch: Callable[[], AttentionPlan]
    ) -> None:
        """by_torch: makes a plan of all that needs no kernel"""
        self._storage = storage
        self._places = places
        self._by_torch = by_torch
        self._readings = readings
        self._splits: dict[float, tuple[list[Reading], Sequence[Group]]] = {}
        self._tables: dict[tuple[float, int, int | None, int | None], list[Table]] = {}
        self._is_decoding = all(each.length == 1 for each in readings)
        self._other: AttentionPlan | None = None

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._storage.all_positions(layer)
        kernel = kernel_of(query, keys, values, scoring)
        if kernel is None or not self._split(kernel.most_keys)[0]:
            return self._plan_by_torch().run(layer, query, key, value, scoring=scoring)
        new = None if key is None or value is None else (key, value)
        if new is not None and not self._is_decoding:
            self._storage.write(layer, self._places, *new)
            new = None
        output = query.new_empty(query.shape)
        for table in self._tables_for(kernel, scoring):
            kernel.run(query, keys, values, table, output, scale=scoring.scale, new=new)
        for group in self._split(kernel.most_keys)[1]:
            keys, values = self._storage.read(layer, group)
            mask = group.mask(scoring.window, query.dtype, query.device, chunk=scoring.chunk)
            group.put(output, attend(group.queries(query), keys, values, mask=mask, scale=scoring.scale))
        return output

    def attending(self, query: Tensor, scoring: Scoring) -> Attending | None:
        """How the kernel attends to all queries in one call; None where it does not.

        query: [..., heads, dim], of the form that the step's have
        """
        keys, values = self._storage.all_positions(0)
        kernel = kernel_of(query, keys, values, scoring)
        if kernel is None or self._split(kernel.most_keys)[1]:
            return None
        tables = self._tables_for(kernel, scoring)
        if len(tables) != 1:
            return None
        return Attending(
            kernel=kernel, table=tables[0], storage=self._storage, places=self._places, is_decoding=self._is_decoding
        )

    def _split(self, most_keys: float) -> tuple[list[Reading], Sequence[Group]]:
        """What is the kernel's, and what torch's."""
        if most_keys not in self._splits:
            ours = [each for each in self._readings if _is_ours(each, most_keys)]
            others = self._storage.groups([each for each in self._readings if not _is_ours(each, most_keys)])
            self._splits[most_keys] = ours, others
        return self._splits[most_keys]

    def _tables_for(self, kernel: RowsKernel, scoring: Scoring) -> list[Table]:
        name = kernel.most_keys, kernel.tile, scoring.window, scoring.chunk
        if name not in self._tables:
            readings, _ = self._split(kernel.most_keys)
            rows = rows_of(self._storage, readings, window=scoring.window, chunk=scoring.chunk, tile=kernel.tile)
            self._tables[name] = tables_of(rows)
        return self._tables[name]

    def _plan_by_torch(self) -> AttentionPlan:
        if self._other is None:
            self._other = self._by_torch()
        return self._other


def _is_ours(reading: Reading, most_keys: float) -> bool:
    return reading.length <= SHORT or (takes_prompts() and reading.num_keys <= most_keys)


@functools.cache
def takes_prompts() -> bool:
    """Not where torch attends by AMX, which was not compared."""
    return not torch.cpu._is_amx_tile_supported()


def kernel_of(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> RowsKernel | None:
    """The kernel for such a layer, if there is one."""
    if scoring.softcap is not None or scoring.sinks is not None or keys.shape != values.shape:
        return None
    if query.dtype != keys.dtype:
        return None
    heads, kv_heads = query.shape[1], keys.shape[1]
    return rows_kernel(heads // kv_heads, query.shape[2], query.dtype) if heads % kv_heads == 0 else None


def rows_of(
    storage: Lanes, readings: Sequence[Reading], *, window: int | None, chunk: int | None, tile: int = 1
) -> list[Row]:
    """Each query, with the keys that it sees; as many of a prompt together as a tile has, where these see its first.

    tile: begins where a position is a multiple of it, so that how queries are taken together is theirs alone
    """
    rows = []
    seen_whole = min(math.inf if each is None else each for each in (window, chunk))
    for reading, common in zip(readings, _in_common(storage, readings), strict=True):
        lane = storage.first_position(reading.place)
        number = 0
        while number < reading.length:
            position, token = reading.start + number, reading.first_token + number
            in_window = 0 if window is None else position + 1 - window
            begin = max(0, in_window, 0 if chunk is None else position - position % chunk)
            count = 1 if begin else int(min(reading.length - number, tile - position % tile, seen_whole - position))
            own, elsewhere = lane + begin, () if begin else common
            num_keys = position + 1 - begin
            rows.append(Row(token=token, position=own, num_keys=num_keys, elsewhere=elsewhere, num_queries=count))
            number += count
    return rows


def _in_common(storage: Lanes, readings: Sequence[Reading]) -> list[Sequence[int]]:
    """Of each, from where its first stretches are read: of copies of a prefix one is, which stays in the CPU's cache.

    Names say what is the same: a block's covers all that is before it.
    """
    from serve_app.engine.cpu.attention_form import STRETCH

    num_blocks = STRETCH // storage.block_size
    if len(readings) < 2 or STRETCH % storage.block_size:
        return [()] * len(readings)
    lanes: dict[bytes, int] = {}
    found: list[Sequence[int]] = []
    for reading in readings:
        own, computed = storage.first_position(reading.place), reading.names[: reading.start // storage.block_size]
        last = computed[num_blocks - 1 :: num_blocks]
        found.append([lanes.setdefault(name, own) + at * STRETCH for at, name in enumerate(last)])
    return found
