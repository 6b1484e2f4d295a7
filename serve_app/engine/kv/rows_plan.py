"""A step's attention on a CPU: each query by itself, by a kernel of our own; long prompts in torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from serve_app.engine.decoder.attention import attend
from serve_app.engine.kv.groups import Group, Reading
from serve_app.engine.kv.plan import AttentionPlan, Scoring
from serve_app.engine.kv.storage import Storage
from serve_app.kernels.forms import Row
from serve_app.kernels.interface import attention_of_rows

if TYPE_CHECKING:
    from serve_app.kernels.cpu.rows import RowsKernel, Table


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
        self._ours = [each for each in readings if each.length <= SHORT]
        self._others: Sequence[Group] | None = None
        self._tables: dict[tuple[int | None, int | None], list[Table]] = {}
        self._is_decoding = all(each.length == 1 for each in readings)
        self._other: AttentionPlan | None = None

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._storage.all_positions(layer)
        kernel = kernel_of(query, keys, values, scoring)
        if kernel is None or not self._ours:
            return self._plan_by_torch().run(layer, query, key, value, scoring=scoring)
        new = None if key is None or value is None else (key, value)
        if new is not None and not self._is_decoding:
            self._storage.write(layer, self._places, *new)
            new = None
        output = query.new_empty(query.shape)
        for table in self._tables_for(kernel, scoring):
            kernel.run(query, keys, values, table, output, scale=scoring.scale, new=new)
        for group in self._groups():
            keys, values = self._storage.read(layer, group)
            mask = group.mask(scoring.window, query.dtype, query.device, chunk=scoring.chunk)
            group.put(output, attend(group.queries(query), keys, values, mask=mask, scale=scoring.scale))
        return output

    def _groups(self) -> Sequence[Group]:
        """What is torch's."""
        if self._others is None:
            self._others = self._storage.groups([each for each in self._readings if each.length > SHORT])
        return self._others

    def _tables_for(self, kernel: RowsKernel, scoring: Scoring) -> list[Table]:
        name = scoring.window, scoring.chunk
        if name not in self._tables:
            stretch = kernel.stretch
            rows = rows_of(self._storage, self._ours, window=scoring.window, chunk=scoring.chunk, stretch=stretch)
            self._tables[name] = kernel.tables(rows)
        return self._tables[name]

    def _plan_by_torch(self) -> AttentionPlan:
        if self._other is None:
            self._other = self._by_torch()
        return self._other


def kernel_of(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> RowsKernel | None:
    """The kernel for such a layer, if there is one."""
    if scoring.softcap is not None or scoring.sinks is not None or keys.shape != values.shape:
        return None
    if query.dtype != keys.dtype:
        return None
    heads, kv_heads = query.shape[1], keys.shape[1]
    return attention_of_rows(heads // kv_heads, query.shape[2], query.dtype) if heads % kv_heads == 0 else None


def rows_of(
    storage: Lanes, readings: Sequence[Reading], *, window: int | None, chunk: int | None, stretch: int
) -> list[Row]:
    """Return each query with the keys that it sees; stretch: keys that may be read elsewhere together."""
    rows = []
    for reading, common in zip(readings, _in_common(storage, readings, stretch), strict=True):
        lane = storage.first_position(reading.place)
        for number in range(reading.length):
            position, token = reading.start + number, reading.first_token + number
            in_window = 0 if window is None else position + 1 - window
            begin = max(0, in_window, 0 if chunk is None else position - position % chunk)
            elsewhere = () if begin else common
            rows.append(Row(token=token, position=lane + begin, num_keys=position + 1 - begin, elsewhere=elsewhere))
    return rows


def _in_common(storage: Lanes, readings: Sequence[Reading], stretch: int) -> list[Sequence[int]]:
    """Return of each from where its first stretches are read.

    Of copies of a prefix one is read, which stays in the CPU's cache. Names say what is the same: a block's covers all
    that is before it.
    """
    num_blocks = stretch // storage.block_size
    if len(readings) < 2 or stretch % storage.block_size:
        return [()] * len(readings)
    lanes: dict[bytes, int] = {}
    found: list[Sequence[int]] = []
    for reading in readings:
        own, computed = storage.first_position(reading.place), reading.names[: reading.start // storage.block_size]
        last = computed[num_blocks - 1 :: num_blocks]
        found.append([lanes.setdefault(name, own) + at * stretch for at, name in enumerate(last)])
    return found
