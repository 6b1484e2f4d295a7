"""Paged attention with Triton: one launch to write, one or two per kind of query, along the block tables.

A tile is some neighbouring queries of one sequence with all the heads that share a key head, so that
each key is read once for all of them. Sums are float32; products of float32 are float32's, not TF32's. Tiles are rows
of int32: of the block table, the first query's token, its position, how many queries. Pages are contiguous,
[blocks, BLOCK_SIZE, KV_HEADS, dim]. WINDOW, CHUNK and SPLIT are 0 where there is none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from serve_app.kernels.forms import Scoring, Tiles

SPLIT = 256
"""Positions that one program adds up before they are merged; fixed, so that no row's sums depend on its company."""
MAX_SPLITS = 64
"""Of one row; longer contexts have longer splits, which follow from the longest that a sequence may have."""
CHUNK_QUERIES = 16
"""Of a chunk, in one tile; its rows are as many times the heads that share a key head."""
KEYS_PER_TILE = 64
NUM_PROGRAMS = 1024
"""Programs of one launch that keep a GPU busy; beyond it each takes several splits."""


def attend(
    query: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, *, scoring: Scoring, max_keys: int, split: int
) -> Tensor:
    """Return what the tiles' queries [tokens, heads, dim] attend to in one layer's pages.

    max_keys: no query sees more;  split: positions that are added up before they are merged
    """
    query = _dense(query)
    output = query.new_empty(*query.shape[:2], values.shape[-1])
    if tiles.chunks.shape[1]:
        _attend_chunks(query, keys, values, output, tiles, scoring)
    if tiles.singles.shape[1]:
        _attend_singles(query, keys, values, output, tiles, scoring, max_keys=max_keys, split=split)
    return output


def _attend_chunks(query: Tensor, keys: Tensor, values: Tensor, output: Tensor, tiles: Tiles, scoring: Scoring) -> None:
    num_tiles, kv_heads = tiles.chunks.shape[1], keys.shape[2]
    constants = _constants(query, keys, values, scoring)
    rows = next_power_of_2(CHUNK_QUERIES * (query.shape[1] // kv_heads))
    attend_tile[(num_tiles, kv_heads)](
        query, keys, values, output, output, tiles.tables, tiles.chunks, _sinks(scoring, query),
        scoring.scale, scoring.softcap or 1.0, query.stride(0), query.stride(1), tiles.tables.shape[1],
        num_tiles, 1, **constants, SPLIT=0, ROWS=rows,
    )  # fmt: skip


def _attend_singles(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    tiles: Tiles,
    scoring: Scoring,
    *,
    max_keys: int,
    split: int,
) -> None:
    num_tiles, kv_heads, heads = tiles.singles.shape[1], keys.shape[2], query.shape[1]
    num_slots = _num_slots(scoring, max_keys, split)
    parts = torch.empty(num_tiles, heads, num_slots, values.shape[-1], dtype=torch.float32, device=query.device)
    weights = torch.empty(num_tiles, heads, num_slots, dtype=torch.float32, device=query.device)
    constants = _constants(query, keys, values, scoring)
    rows = max(16, next_power_of_2(heads // kv_heads))  # tensor cores take sixteen at least
    num_programs = min(num_slots, max(1, NUM_PROGRAMS // (num_tiles * kv_heads)))
    attend_tile[(num_tiles, kv_heads, num_programs)](
        query, keys, values, parts, weights, tiles.tables, tiles.singles, _sinks(scoring, query),
        scoring.scale, scoring.softcap or 1.0, query.stride(0), query.stride(1), tiles.tables.shape[1],
        num_tiles, num_slots, **constants, SPLIT=split, ROWS=rows,
    )  # fmt: skip
    shared = {name: constants[name] for name in ("VALUE_DIM", "WINDOW", "CHUNK", "HAS_SINKS", "VALUE_WIDTH")}
    merge_splits[(num_tiles, heads)](
        output, parts, weights, tiles.singles, _sinks(scoring, query), num_tiles, num_slots,
        HEADS=heads, SPLIT=split, **shared,
    )  # fmt: skip


def _num_slots(scoring: Scoring, max_keys: int, split: int) -> int:
    """Splits that one query can see something of."""
    visible = min(max_keys, scoring.window or max_keys, scoring.chunk or max_keys)
    return min(-(-max_keys // split), -(-visible // split) + 1)


def write(keys: Tensor, values: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
    """Write new keys and values [tokens, kv_heads, dim] to the places [tokens] of one layer's pages."""
    key, value = _dense(key), _dense(value)
    kv_heads, key_dim, value_dim = key.shape[1], key.shape[2], value.shape[2]
    write_pages[(key.shape[0],)](
        keys, values, key, value, places, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV_HEADS=kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_WIDTH=next_power_of_2(kv_heads * key_dim), VALUE_WIDTH=next_power_of_2(kv_heads * value_dim),
    )  # fmt: skip


def split_of(max_model_len: int) -> int:
    """Positions per split for contexts of up to so many tokens."""
    return max(SPLIT, int(next_power_of_2(-(-max_model_len // MAX_SPLITS))))


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


# fmt: off
@triton.jit
def write_pages(
    keys, values, key, value, places, key_token, key_head, value_token, value_head,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):
    """Put key and value [tokens, KV_HEADS, dim] of one token at its place; nowhere, where that is negative."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token)
    if place >= 0:
        at = tl.arange(0, KEY_WIDTH)
        mask = at < KV_HEADS * KEY_DIM
        given = tl.load(key + token * key_token + at // KEY_DIM * key_head + at % KEY_DIM, mask=mask)
        tl.store(keys + place * KV_HEADS * KEY_DIM + at, given, mask=mask)
        at = tl.arange(0, VALUE_WIDTH)
        mask = at < KV_HEADS * VALUE_DIM
        given = tl.load(value + token * value_token + at // VALUE_DIM * value_head + at % VALUE_DIM, mask=mask)
        tl.store(values + place * KV_HEADS * VALUE_DIM + at, given, mask=mask)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a query at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def scan_keys(
    query, positions, keys, values, table, kv_head, low, high, scale, softcap,
    KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):
    """Attend to positions low … high-1: highest score, sum of weights [ROWS], weighted values [ROWS, VALUE_WIDTH]."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    of_key, of_value = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    for first in range(low, high, TILE):
        seen = first + tl.arange(0, TILE)
        exists = seen < high
        page = tl.load(table + seen // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        place = (page * BLOCK_SIZE + seen % BLOCK_SIZE) * KV_HEADS + kv_head
        mask = exists[None, :] & (of_key < KEY_DIM)[:, None]
        key = tl.load(keys + place[None, :] * KEY_DIM + of_key[:, None], mask=mask, other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        is_seen = exists[None, :] & (seen[None, :] <= positions[:, None])
        is_seen = is_seen & (seen[None, :] >= first_seen(positions, WINDOW, CHUNK)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(best == float("-inf"), 0.0, best)
        weights = tl.exp(scores - base[:, None])
        fade = tl.exp(top - base)
        mask = exists[:, None] & (of_value < VALUE_DIM)[None, :]
        value = tl.load(values + place[:, None] * VALUE_DIM + of_value[None, :], mask=mask, other=0.0)
        sums = sums * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        top = best
    return top, tl.where(total > 0.0, total, 1.0), sums  # rows beyond the tile's queries may have seen nothing


@triton.jit
def attend_tile(
    query, keys, values, output, weights, tables, tiles, sinks, scale, softcap,
    query_token, query_head, table_width, num_tiles, num_slots,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):
    """Attend for one tile and key head.

    Without SPLIT to all keys, into output [tokens, heads, VALUE_DIM]. With it, of tiles of one query, to every so
    manieth stretch of SPLIT positions, into output [tiles, heads, slots, VALUE_DIM] float32 and weights
    [tiles, heads, slots], the logarithm of each stretch's sum.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row, token = tl.load(tiles + tile).to(tl.int64), tl.load(tiles + num_tiles + tile).to(tl.int64)
    start, length = tl.load(tiles + 2 * num_tiles + tile), tl.load(tiles + 3 * num_tiles + tile)
    number = tl.arange(0, ROWS) // GROUP
    head = kv_head * GROUP + tl.arange(0, ROWS) % GROUP
    of_key, of_value = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    mask = (number < length)[:, None] & (of_key < KEY_DIM)[None, :]
    place = (token + number) * query_token + head * query_head
    asked = tl.load(query + place[:, None] + of_key[None, :], mask=mask, other=0.0)
    begin, end, table = first_seen(start, WINDOW, CHUNK), start + length, tables + row * table_width
    mask = (number < length)[:, None] & (of_value < VALUE_DIM)[None, :]
    if SPLIT == 0:
        top, total, sums = scan_keys(
            asked, start + number, keys, values, table, kv_head, begin, end, scale, softcap, KV_HEADS, KEY_DIM,
            VALUE_DIM, BLOCK_SIZE, WINDOW, CHUNK, HAS_SOFTCAP, ROWS, TILE, KEY_WIDTH, VALUE_WIDTH)
        if HAS_SINKS:
            total += tl.exp(tl.load(sinks + head, mask=number < length, other=0.0).to(tl.float32) - top)
        place = ((token + number) * (KV_HEADS * GROUP) + head) * VALUE_DIM
        attended = (sums / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + place[:, None] + of_value[None, :], attended, mask=mask)
    else:
        for split in range(begin // SPLIT + tl.program_id(2), tl.cdiv(end, SPLIT), tl.num_programs(2)):
            top, total, sums = scan_keys(
                asked, start + number, keys, values, table, kv_head, tl.maximum(begin, split * SPLIT),
                tl.minimum(end, split * SPLIT + SPLIT), scale, softcap, KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE,
                WINDOW, CHUNK, HAS_SOFTCAP, ROWS, TILE, KEY_WIDTH, VALUE_WIDTH)
            slot = (tile.to(tl.int64) * (KV_HEADS * GROUP) + head) * num_slots + split - begin // SPLIT
            tl.store(output + slot[:, None] * VALUE_DIM + of_value[None, :], sums / total[:, None], mask=mask)
            tl.store(weights + slot, top + tl.log(total), mask=number < length)


@triton.jit
def merge_splits(
    output, parts, weights, tiles, sinks, num_tiles, num_slots,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):
    """Add up what the splits of one query and head gave, in their order; a tile of no query gives zeros."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(tiles + num_tiles + tile).to(tl.int64)
    start, length = tl.load(tiles + 2 * num_tiles + tile), tl.load(tiles + 3 * num_tiles + tile)
    dims = tl.arange(0, VALUE_WIDTH)
    sums = tl.zeros([VALUE_WIDTH], tl.float32)
    top, total = float("-inf"), 0.0
    if HAS_SINKS:
        top, total = tl.load(sinks + head).to(tl.float32), 1.0
    begin = first_seen(start, WINDOW, CHUNK) // SPLIT
    for split in range(begin, tl.cdiv(start + length, SPLIT)):
        slot = (tile * HEADS + head) * num_slots + split - begin
        weight = tl.load(weights + slot)
        best = tl.maximum(top, weight)
        fade, share = tl.exp(top - best), tl.exp(weight - best)
        sums = sums * fade + share * tl.load(parts + slot * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
        total = total * fade + share
        top = best
    attended = tl.where(total > 0.0, sums / tl.where(total > 0.0, total, 1.0), 0.0).to(output.dtype.element_ty)
    tl.store(output + (token * HEADS + head) * VALUE_DIM + dims, attended, mask=dims < VALUE_DIM)
# fmt: on
