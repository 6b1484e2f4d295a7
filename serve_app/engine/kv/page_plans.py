"""Attention plans for pages: FlashInfer, Triton's kernels, or torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from serve_app.engine.decoder.attention import attend
from serve_app.engine.decoder.host_copies import sent
from serve_app.engine.kv.storage import AttentionPlan, Reading
from serve_app.kernels.forms import Scoring, Tiles
from serve_app.kernels.interface import paged_kernels


class GatheredPlan:
    """An `AttentionPlan` of tiles of one query, or none, which gathers all pages that their tables could name.

    keys, values: per layer [blocks, block_size, kv_heads, dim], whose last page stays zeros
    padding: the number of that page
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], tiles: Tiles, *, padding: int) -> None:
        self._keys = keys
        self._values = values
        self._tiles = tiles
        self._padding = padding

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        if key is not None and value is not None:
            self._write(keys, key)
            self._write(values, value)
        rows, tokens, starts, lengths = self._tiles.singles.long()
        tables = self._tiles.tables.index_select(0, rows).long()  # [tiles, blocks]
        attended = attend(
            query.index_select(0, tokens)[:, None],
            keys[tables].flatten(1, 2),
            values[tables].flatten(1, 2),
            mask=_mask(starts, tables.shape[1] * keys.shape[1], scoring, query.dtype),
            scale=scoring.scale,
            softcap=scoring.softcap,
            sinks=scoring.sinks,
        )[:, 0]
        attended = torch.where((lengths > 0)[:, None, None], attended, 0.0)
        output = query.new_zeros(*query.shape[:2], values.shape[-1])
        return output.index_copy_(0, tokens, attended.to(output.dtype))

    def _write(self, pages: Tensor, new: Tensor) -> None:
        """At the tokens' places; of those that have none, zeros into the page of zeros."""
        places = self._tiles.places
        is_written = places >= 0
        targets = torch.where(is_written, places, self._padding * pages.shape[1])
        pages.view(-1, *pages.shape[2:]).index_copy_(0, targets, torch.where(is_written[:, None, None], new, 0.0))


def _mask(starts: Tensor, num_keys: int, scoring: Scoring, dtype: torch.dtype) -> Tensor:
    """[tiles, 1, 1, num_keys]: 0 where a query sees a key, else -inf; starts: [tiles], the queries' positions"""
    keys = torch.arange(num_keys, device=starts.device)
    hidden = keys > starts[:, None]
    if scoring.window is not None:
        hidden |= keys <= (starts - scoring.window)[:, None]
    if scoring.chunk is not None:
        hidden |= keys < (starts - starts % scoring.chunk)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=starts.device).masked_fill_(hidden, -torch.inf)[:, None, None]


How: TypeAlias = tuple[float, int | None, float | None]
"""Scale, window and softcap."""

WORKSPACE_BYTES = 256 << 20
"""For what its kernels keep of splits; all wrappers of a replica have the same, as one at a time is run."""


class Wrapper(Protocol):
    """What of `flashinfer.BatchPrefillWithPagedKVCacheWrapper` is used."""

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """A step's queries and pages, sequence by sequence, int32 in the host's memory, where FlashInfer plans.

    queries: [sequences + 1], where each one's tokens begin in the packed row, and the end
    pages:   [sequences + 1], where each one's begin among the numbers
    numbers: of pages
    last:    [sequences], positions in the last page of each, 1 at least
    """

    queries: Tensor
    pages: Tensor
    numbers: Tensor
    last: Tensor


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

    keys, values: per layer [blocks, block_size, kv_heads, dim], contiguous
    others: makes the plan that computes the layers which FlashInfer does not know
    """

    def __init__(
        self,
        flashinfer: FlashInfer,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        readings: Sequence[Reading],
        places: Tensor,
        *,
        others: Callable[[], AttentionPlan],
    ) -> None:
        self._flashinfer = flashinfer
        self._keys = keys
        self._values = values
        self._places = places
        self._indices = lay_indices(readings, block_size=keys[0].shape[1])
        self._planned: dict[How, Wrapper] = {}
        self._make_others = others
        self._others: AttentionPlan | None = None

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        if scoring.chunk is not None or scoring.sinks is not None or keys.shape != values.shape:
            self._others = self._others or self._make_others()
            return self._others.run(layer, query, key, value, scoring=scoring)
        if key is not None and value is not None:
            for pages, new in ((keys, key), (values, value)):
                pages.view(-1, *pages.shape[2:]).index_copy_(0, self._places, new)
        wrapper = self._planned_for(scoring, query, keys)
        return wrapper.run(query.contiguous(), (keys, values))

    def _planned_for(self, scoring: Scoring, query: Tensor, keys: Tensor) -> Wrapper:
        how = (scoring.scale, scoring.window, scoring.softcap)
        if how not in self._planned:
            wrapper = self._planned[how] = self._flashinfer.wrapper_of(scoring)
            wrapper.plan(
                qo_indptr=self._indices.queries,
                paged_kv_indptr=self._indices.pages,
                paged_kv_indices=self._indices.numbers.to(query.device),
                paged_kv_last_page_len=self._indices.last,
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


def lay_indices(readings: Sequence[Reading], *, block_size: int) -> Indices:
    """readings: in the order of their tokens in the packed row, which they fill"""
    pages = [each.blocks[: -(-each.num_keys // block_size)] for each in readings]
    return Indices(
        queries=_begins(each.length for each in readings),
        pages=_begins(len(each) for each in pages),
        numbers=_int32([number for each in pages for number in each]),
        last=_int32([(each.num_keys - 1) % block_size + 1 for each in readings]),
    )


def _begins(lengths: Iterable[int]) -> Tensor:
    return _int32(list(accumulate(lengths, initial=0)))


def _int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class PagedPlan:
    """An `AttentionPlan` by Triton's kernels.

    keys, values: per layer [blocks, block_size, kv_heads, dim], contiguous
    max_keys: no query of the step sees more;  split: positions that are added up before they are merged
    """

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], tiles: Tiles, *, max_keys: int, split: int
    ) -> None:
        self._keys = keys
        self._values = values
        self._max_keys = max_keys
        self._split = split
        self.tiles = tiles

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        by, keys, values = paged_kernels(), self._keys[layer], self._values[layer]
        if key is not None and value is not None:
            by.write(keys, values, self.tiles.places, key, value)
        attended: Tensor = by.attend(
            query, keys, values, self.tiles, scoring=scoring, max_keys=self._max_keys, split=self._split
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
    tables = [number for each in readings for number in _row(each.blocks, width)]
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


def _row(blocks: Sequence[int], width: int) -> list[int]:
    return [*blocks[:width], *[0] * (width - len(blocks))]


def _columns(tiles: Sequence[tuple[int, int, int, int]]) -> list[int]:
    return [tile[column] for column in range(4) for tile in tiles]
