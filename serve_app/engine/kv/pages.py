"""Keys and values in pages: a block stays where it is, and running sequences share it; and attention over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from serve_app.engine.decoder.memory import sent
from serve_app.engine.kv.reservation import Reservation
from serve_app.engine.kv.rows import RowsPlan
from serve_app.engine.kv.storage import (
    AttentionPlan,
    Group,
    GroupedPlan,
    Holding,
    KeyValueShape,
    Reading,
    Slots,
    runs,
    tiles,
)
from serve_app.kernels.forms import Scoring, Tiles
from serve_app.kernels.interface import Kernels, paged_kernels


class PageStorage:
    """A `Storage` for any device.

    keys, values: per layer [num_blocks + 1, block_size, heads, dim]; the last page is zeros for ever, where tables
    are padded
    kernels: whose compute attention; torch's are the reference, and on CPUs kernels of ours come before them
    flashinfer: who is asked first, with any kernels; None is nobody, unless kernels says so
    max_model_len: the longest context, by which kernels share a long row out
    padding: the page where tables are padded

    On CPUs all of a block lies together. So its memory can be given back: address space is for the worst case, and only
    what is used takes memory.
    """

    def __init__(
        self,
        shape: KeyValueShape,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels = "torch",
        max_model_len: int = 0,
        flashinfer: FlashInfer | None = None,
    ) -> None:
        self._has_triton = kernels != "torch"
        self._flashinfer = FlashInfer.on(device) if kernels == "flashinfer" and flashinfer is None else flashinfer
        self._attends_to_rows = device.type == "cpu" and not self._has_triton
        self._max_model_len = max_model_len
        self.block_size = block_size
        self.padding = num_blocks
        self._device = device
        self._memories: list[tuple[Reservation, int]] = []
        self._used: set[int] = set()  # blocks that were claimed; those of memory that was given back are zeros
        sizes = [(each.heads, dim) for each in shape.layers for dim in (each.key_dim, each.value_dim)]
        self._pools = {
            size: self._pool((num_blocks + 1, sizes.count(size), block_size, *size), dtype)
            for size in dict.fromkeys(sizes)
        }
        rest = {size: iter(pool.unbind(1)) for size, pool in self._pools.items()}
        parts = [Slots.of(next(rest[size])) for size in sizes]
        self._slots = list(zip(parts[::2], parts[1::2], strict=True))
        self._keys, self._values = [each.pages for each in parts[::2]], [each.pages for each in parts[1::2]]

    def claim(self, blocks: Sequence[int]) -> None:
        written = [each for each in blocks if each in self._used] if self._memories else blocks
        self._used.update(blocks)
        if not written:
            return
        ids = sent(torch.tensor(written), self._device)
        for pool in self._pools.values():  # one launch each, mostly one of all
            pool.index_fill_(0, ids, 0)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        for pool in self._pools.values():
            pool[target, :, :num_tokens].copy_(pool[source, :, :num_tokens])

    def discard(self, blocks: Sequence[int]) -> None:
        self._used.difference_update(blocks)
        for memory, size in self._memories:
            for begin, end in stretches_of(blocks):
                memory.give_back(begin * size, end * size)

    def places(self, holding: Holding, begin: int, end: int) -> Sequence[int]:
        size, blocks = self.block_size, holding.blocks
        return [blocks[position // size] * size + position % size for position in range(begin, end)]

    def plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        if self._flashinfer is not None:
            others = lambda: self._own_plan(readings, places)  # noqa: E731
            return FlashInferPlan(self._flashinfer, self._slots, readings, places, others=others)
        return self._own_plan(readings, places)

    def _own_plan(self, readings: Sequence[Reading], places: Tensor) -> AttentionPlan:
        if self._attends_to_rows:
            return RowsPlan(self, self._slots, readings, places, groups_of=self.groups)
        if not self._has_triton:
            return GroupedPlan(self, self.groups(readings), places)
        return plan_paged(self._keys, self._values, readings, places, split=self._split)

    def plan_tiles(self, tiles: Tiles, *, max_keys: int) -> AttentionPlan:
        """Plan single queries over tensors that are filled anew for every step; no query sees more than max_keys.

        Triton's kernels alone follow such tensors.
        """
        return PagedPlan(self._keys, self._values, tiles, max_keys=max_keys, split=self._split)

    @property
    def _split(self) -> int:
        """Return how many positions are added up before they are merged."""
        found: int = paged_kernels().split_of(self._max_model_len)
        return found

    def groups(self, readings: Sequence[Reading]) -> list[Group]:
        singles = [each for each in readings if each.length == 1]
        found = [self._group_of(run) for run in runs(sorted(singles, key=lambda each: each.num_keys))]
        for reading in readings:
            if reading.length > 1:
                found += tiles(reading, self._table([reading.blocks], reading.num_keys))
        return found

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        for slots, new in zip(self._slots[layer], (key, value), strict=True):
            slots.write(places, new)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            each.pages.index_select(0, rows.flatten()).view(len(rows), -1, *each.pages.shape[2:])
            for each in self._slots[layer]
        )
        return keys, values

    def _pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros [blocks, parts, block_size, heads, dim]; a part is the keys or the values of a layer."""
        blocks, parts, *sizes = shape
        if not self._attends_to_rows:  # kernels of GPUs want all pages of a part side by side
            return torch.zeros(parts, blocks, *sizes, dtype=dtype, device=self._device).transpose(0, 1)
        block_bytes = prod(shape[1:]) * dtype.itemsize
        memory = Reservation(blocks * block_bytes)
        self._memories.append((memory, block_bytes))
        return memory.tensor(shape, dtype)

    def _group_of(self, run: Sequence[Reading]) -> Group:
        num_keys = max(reading.num_keys for reading in run)
        return Group(
            rows=self._table([reading.blocks for reading in run], num_keys),
            tokens=sent(torch.tensor([reading.first_token for reading in run]), self._device),
            length=1,
            num_keys=num_keys,
            starts=tuple(reading.start for reading in run),
        )

    def _table(self, tables: Sequence[Sequence[int]], num_keys: int) -> Tensor:
        """Block tables of equal width, [rows, blocks] int64."""
        width = -(-num_keys // self.block_size)
        padded = [[*table[:width], *[self.padding] * (width - len(table))] for table in tables]
        return sent(torch.tensor(padded), self._device)


def stretches_of(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Return from which block to which (excluded) as few stretches go as hold these blocks, and no other."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found


How: TypeAlias = tuple[float, int | None, float | None]
"""Scale, window and softcap."""

WORKSPACE_BYTES = 256 << 20
"""For what its kernels keep of splits. All wrappers of a replica share it, as one at a time runs."""


Wrapper: TypeAlias = Any
"""A `flashinfer.BatchPrefillWithPagedKVCacheWrapper`, of which `plan` and `run` are used."""


class FlashInfer:
    """Has a wrapper for each way of scoring, which is planned once per step.

    make_wrapper: a new one
    """

    def __init__(self, make_wrapper: Callable[[], Wrapper]) -> None:
        self._make_wrapper = make_wrapper
        self._wrappers: dict[How, Wrapper] = {}

    @classmethod
    def on(cls, device: torch.device) -> FlashInfer:
        """Raises ImportError where it is not installed."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return cls(lambda: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))

    def wrapper_of(self, scoring: Scoring) -> Wrapper:
        how = (scoring.scale, scoring.window, scoring.softcap)
        if how not in self._wrappers:
            self._wrappers[how] = self._make_wrapper()
        return self._wrappers[how]


class FlashInferPlan:
    """An `AttentionPlan` by FlashInfer.

    layers: of each its keys and its values
    others: makes the plan that computes the layers which FlashInfer does not know
    """

    def __init__(
        self,
        flashinfer: FlashInfer,
        layers: Sequence[tuple[Slots, Slots]],
        readings: Sequence[Reading],
        places: Tensor,
        *,
        others: Callable[[], AttentionPlan],
    ) -> None:
        self._flashinfer = flashinfer
        self._layers = layers
        self._places = places
        self._indices = lay_indices(readings, block_size=layers[0][0].pages.shape[1], device=places.device)
        self._planned: dict[How, Wrapper] = {}
        self._make_others = others
        self._others: AttentionPlan | None = None

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        slots = self._layers[layer]
        keys, values = (each.pages for each in slots)
        if scoring.chunk is not None or scoring.sinks is not None or keys.shape != values.shape:
            self._others = self._others or self._make_others()
            return self._others.run(layer, query, key, value, scoring=scoring)
        if key is not None and value is not None:
            for each, new in zip(slots, (key, value), strict=True):
                each.write(self._places, new)
        wrapper = self._planned_for(scoring, query, keys)
        attended: Tensor = wrapper.run(query.contiguous(), (keys, values))
        return attended

    def _planned_for(self, scoring: Scoring, query: Tensor, keys: Tensor) -> Wrapper:
        how = (scoring.scale, scoring.window, scoring.softcap)
        if how not in self._planned:
            wrapper = self._planned[how] = self._flashinfer.wrapper_of(scoring)
            wrapper.plan(
                **self._indices,
                num_qo_heads=query.shape[1],
                num_kv_heads=keys.shape[2],
                head_dim_qk=keys.shape[3],
                page_size=keys.shape[1],
                causal=True,
                sm_scale=scoring.scale,
                window_left=-1 if scoring.window is None else scoring.window - 1,
                logits_soft_cap=scoring.softcap or 0.0,
                q_data_type=query.dtype,
                kv_data_type=keys.dtype,
            )
        return self._planned[how]


def lay_indices(readings: Sequence[Reading], *, block_size: int, device: torch.device) -> dict[str, Tensor]:
    """Return a step's queries and pages as FlashInfer's `plan` names them, int32.

    readings: in the order of their tokens in the packed row, which they fill
    device:   of the pages' numbers; the rest is in the host's memory, where FlashInfer plans
    """
    pages = [each.blocks[: -(-each.num_keys // block_size)] for each in readings]
    return {
        "qo_indptr": _begins(each.length for each in readings),
        "paged_kv_indptr": _begins(len(each) for each in pages),
        "paged_kv_indices": sent(_int32([number for each in pages for number in each]), device),
        "paged_kv_last_page_len": _int32([(each.num_keys - 1) % block_size + 1 for each in readings]),
    }


def _begins(lengths: Iterable[int]) -> Tensor:
    return _int32(list(accumulate(lengths, initial=0)))


def _int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """An `AttentionPlan` by Triton's kernels.

    keys, values: per layer [blocks, block_size, kv_heads, dim], contiguous
    max_keys: no query of the step sees more;  split: positions that are added up before they are merged
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    tiles: Tiles
    max_keys: int
    split: int

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        by, keys, values = paged_kernels(), self.keys[layer], self.values[layer]
        if key is not None and value is not None:
            by.write(keys, values, self.tiles.places, key, value)
        attended: Tensor = by.attend(
            query, keys, values, self.tiles, scoring=scoring, max_keys=self.max_keys, split=self.split
        )
        return attended


def plan_paged(
    keys: Sequence[Tensor], values: Sequence[Tensor], readings: Sequence[Reading], places: Tensor, *, split: int
) -> PagedPlan:
    """Return the plan of one step over these pages."""
    tiles = lay_tiles(readings, places=places, block_size=keys[0].shape[1])
    return PagedPlan(keys, values, tiles, max_keys=max(each.num_keys for each in readings), split=split)


def lay_tiles(readings: Sequence[Reading], *, places: Tensor, block_size: int) -> Tiles:
    """Cut a step's queries into tiles; all of it goes to the device at once.

    places: [tokens] int64
    """
    most = paged_kernels().CHUNK_QUERIES
    width = max(-(-reading.num_keys // block_size) for reading in readings)
    tables = [number for each in readings for number in (*each.blocks[:width], *[0] * (width - len(each.blocks)))]
    singles = [(row, each.first_token, each.start, 1) for row, each in enumerate(readings) if each.length == 1]
    chunks = [
        (row, each.first_token + at, each.start + at, min(most, each.length - at))
        for row, each in enumerate(readings)
        if each.length > 1
        for at in range(0, each.length, most)
    ]
    numbers = [*tables, *_columns(singles), *_columns(chunks)]
    packed = sent(torch.tensor(numbers, dtype=torch.int32), places.device)
    tables_end = len(tables)
    singles_end = tables_end + 4 * len(singles)
    return Tiles(
        places=places,
        tables=packed[:tables_end].view(len(readings), width),
        singles=packed[tables_end:singles_end].view(4, len(singles)),
        chunks=packed[singles_end:].view(4, len(chunks)),
    )


def _columns(tiles: Sequence[tuple[int, int, int, int]]) -> list[int]:
    return [tile[column] for column in range(4) for tile in tiles]
