"""One step's attention by kernels that follow the block tables: a launch to write, one or two per kind of query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton import next_power_of_2

from serve_app.engine.decoder.crossing import sent
from serve_app.engine.gpu.paged_kernels import attend_tile, merge_splits, write_pages
from serve_app.engine.gpu.tiles import Tiles
from serve_app.engine.kv.groups import Reading
from serve_app.engine.kv.plan import Scoring

SPLIT = 256
"""Positions that one program adds up before they are merged; fixed, so that no row's sums depend on its company."""
MAX_SPLITS = 64
"""Of one row; longer contexts have longer splits, which follow from the longest that a sequence may have."""
CHUNK_QUERIES = 16
"""Of a chunk, in one tile; its rows are as many times the heads that share a key head."""
KEYS_PER_TILE = 64
NUM_PROGRAMS = 1024
"""Programs of one launch that keep a GPU busy; beyond it each takes several splits."""


class PagedPlan:
    """An `AttentionPlan` by kernels of this folder.

    keys, values: per layer [blocks, block_size, kv_heads, dim], contiguous
    max_keys: no query of the step sees more
    split: positions that are added up before they are merged
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
        keys, values = self._keys[layer], self._values[layer]
        if key is not None and value is not None:
            write(keys, values, self.tiles.places, _dense(key), _dense(value))
        query = _dense(query)
        output = query.new_empty(*query.shape[:2], values.shape[-1])
        if self.tiles.chunks.shape[1]:
            self._attend_chunks(query, keys, values, output, scoring)
        if self.tiles.singles.shape[1]:
            self._attend_singles(query, keys, values, output, scoring)
        return output

    def _attend_chunks(self, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, scoring: Scoring) -> None:
        num_tiles, kv_heads = self.tiles.chunks.shape[1], keys.shape[2]
        constants = _constants(query, keys, values, scoring)
        rows = next_power_of_2(CHUNK_QUERIES * (query.shape[1] // kv_heads))
        attend_tile[(num_tiles, kv_heads)](
            query, keys, values, output, output, self.tiles.tables, self.tiles.chunks, _sinks(scoring, query),
            scoring.scale, scoring.softcap or 1.0, query.stride(0), query.stride(1), self.tiles.tables.shape[1],
            num_tiles, 1, **constants, SPLIT=0, ROWS=rows,
        )  # fmt: skip

    def _attend_singles(self, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, scoring: Scoring) -> None:
        num_tiles, kv_heads, heads = self.tiles.singles.shape[1], keys.shape[2], query.shape[1]
        num_slots = self._num_slots(scoring)
        parts = torch.empty(num_tiles, heads, num_slots, values.shape[-1], dtype=torch.float32, device=query.device)
        weights = torch.empty(num_tiles, heads, num_slots, dtype=torch.float32, device=query.device)
        constants = _constants(query, keys, values, scoring)
        rows = max(16, next_power_of_2(heads // kv_heads))  # tensor cores take sixteen at least
        num_programs = min(num_slots, max(1, NUM_PROGRAMS // (num_tiles * kv_heads)))
        attend_tile[(num_tiles, kv_heads, num_programs)](
            query, keys, values, parts, weights, self.tiles.tables, self.tiles.singles, _sinks(scoring, query),
            scoring.scale, scoring.softcap or 1.0, query.stride(0), query.stride(1), self.tiles.tables.shape[1],
            num_tiles, num_slots, **constants, SPLIT=self._split, ROWS=rows,
        )  # fmt: skip
        shared = {name: constants[name] for name in ("VALUE_DIM", "WINDOW", "CHUNK", "HAS_SINKS", "VALUE_WIDTH")}
        merge_splits[(num_tiles, heads)](
            output, parts, weights, self.tiles.singles, _sinks(scoring, query), num_tiles, num_slots,
            HEADS=heads, SPLIT=self._split, **shared,
        )  # fmt: skip

    def _num_slots(self, scoring: Scoring) -> int:
        """Splits that one query can see something of."""
        visible = min(self._max_keys, scoring.window or self._max_keys, scoring.chunk or self._max_keys)
        return min(-(-self._max_keys // self._split), -(-visible // self._split) + 1)


def plan_paged(
    keys: Sequence[Tensor], values: Sequence[Tensor], readings: Sequence[Reading], places: Tensor, *, split: int
) -> PagedPlan:
    """The plan of one step over these pages."""
    tiles = lay_tiles(readings, places=places, block_size=keys[0].shape[1])
    return PagedPlan(keys, values, tiles, max_keys=max(each.num_keys for each in readings), split=split)


def write(keys: Tensor, values: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
    """Write new keys and values [tokens, kv_heads, dim] to the places [tokens] of one layer's pages."""
    kv_heads, key_dim, value_dim = key.shape[1], key.shape[2], value.shape[2]
    write_pages[(key.shape[0],)](
        keys, values, key, value, places, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV_HEADS=kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_WIDTH=next_power_of_2(kv_heads * key_dim), VALUE_WIDTH=next_power_of_2(kv_heads * value_dim),
    )  # fmt: skip


def split_of(max_model_len: int) -> int:
    """Positions per split for contexts of up to so many tokens."""
    return max(SPLIT, int(next_power_of_2(-(-max_model_len // MAX_SPLITS))))


def lay_tiles(readings: Sequence[Reading], *, places: Tensor, block_size: int) -> Tiles:
    """Cut a step's queries into tiles; all of it goes to the device at once.

    places: [tokens] int64
    """
    width = max(-(-reading.num_keys // block_size) for reading in readings)
    tables = [number for each in readings for number in _row(each.blocks, width)]
    singles = [(row, each.first_token, each.start, 1) for row, each in enumerate(readings) if each.length == 1]
    chunks = [
        (row, each.first_token + at, each.start + at, min(CHUNK_QUERIES, each.length - at))
        for row, each in enumerate(readings)
        if each.length > 1
        for at in range(0, each.length, CHUNK_QUERIES)
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


def _constants(query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> dict[str, int | bool]:
    kv_heads = keys.shape[2]
    return {
        "KV_HEADS": kv_heads,
        "GROUP": query.shape[1] // kv_heads,
        "KEY_DIM": keys.shape[3],
        "VALUE_DIM": values.shape[3],
        "BLOCK_SIZE": keys.shape[1],
        "WINDOW": scoring.window or 0,
        "CHUNK": scoring.chunk or 0,
        "HAS_SOFTCAP": scoring.softcap is not None,
        "HAS_SINKS": scoring.sinks is not None,
        "TILE": KEYS_PER_TILE,
        "KEY_WIDTH": max(16, next_power_of_2(keys.shape[3])),
        "VALUE_WIDTH": max(16, next_power_of_2(values.shape[3])),
    }


def _sinks(scoring: Scoring, query: Tensor) -> Tensor:
    """The sinks, or any tensor in their place, which is not read."""
    return query if scoring.sinks is None else scoring.sinks


def _dense(tensor: Tensor) -> Tensor:
    """With the elements of one head side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
