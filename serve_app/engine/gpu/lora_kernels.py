"""Triton kernels of low-rank changes: rows of one adapter in tiles, each tile with the factors of its own place.

Segmented products after S-LoRA (arXiv 2311.03285) and Punica (arXiv 2310.18547). Sums are float32. The sum over the
inputs is cut at fixed places, so that no row's depends on its company.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def shrink(
    x, down, low, rows, tiles, num_tiles, num_rows, x_row,
    IN: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
):
    """low [splits, num_rows, RANK] float32 = x[rows, a stretch of SPLIT inputs] @ down[place, :, the same].T"""
    tile, split = tl.program_id(0), tl.program_id(1)
    place, first, count = (tl.load(tiles + tile).to(tl.int64), tl.load(tiles + num_tiles + tile),
                           tl.load(tiles + 2 * num_tiles + tile))
    number, of_rank = tl.arange(0, ROWS), tl.arange(0, RANK_WIDTH)
    row = tl.load(rows + first + number, mask=number < count, other=0).to(tl.int64)
    sums = tl.zeros([ROWS, RANK_WIDTH], tl.float32)
    for begin in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, IN), WIDTH):
        at = begin + tl.arange(0, WIDTH)
        mask = (number < count)[:, None] & (at < IN)[None, :]
        given = tl.load(x + row[:, None] * x_row + at[None, :], mask=mask, other=0.0)
        mask = (at < IN)[:, None] & (of_rank < RANK)[None, :]
        factor = tl.load(down + (place * RANK + of_rank[None, :]) * IN + at[:, None], mask=mask, other=0.0)
        sums += tl.dot(given, factor, input_precision="ieee")
    mask = (number < count)[:, None] & (of_rank < RANK)[None, :]
    target = (split.to(tl.int64) * num_rows + first + number) * RANK
    tl.store(low + target[:, None] + of_rank[None, :], sums, mask=mask)


@triton.jit
def expand(
    y, up, low, rows, factors, tiles, num_tiles, num_rows, y_row, up_place, up_output, up_rank,
    OUT: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
):
    """y[rows, WIDTH outputs] += factors * (the splits of low added up) @ up[place, the same].T"""
    tile = tl.program_id(0)
    place, first, count = (tl.load(tiles + tile).to(tl.int64), tl.load(tiles + num_tiles + tile),
                           tl.load(tiles + 2 * num_tiles + tile))
    number, of_rank = tl.arange(0, ROWS), tl.arange(0, RANK_WIDTH)
    mask = (number < count)[:, None] & (of_rank < RANK)[None, :]
    sums = tl.zeros([ROWS, RANK_WIDTH], tl.float32)
    for split in range(SPLITS):
        source = (tl.full([ROWS], split, tl.int64) * num_rows + first + number) * RANK
        sums += tl.load(low + source[:, None] + of_rank[None, :], mask=mask, other=0.0)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (of_rank < RANK)[:, None] & (at < OUT)[None, :]
    factor = tl.load(up + place * up_place + at[None, :] * up_output + of_rank[:, None] * up_rank, mask=mask, other=0.0)
    change = tl.dot(sums.to(factor.dtype), factor, input_precision="ieee")
    share = tl.load(factors + first + number, mask=number < count, other=0.0)
    row = tl.load(rows + first + number, mask=number < count, other=0).to(tl.int64)
    mask = (number < count)[:, None] & (at < OUT)[None, :]
    target = y + row[:, None] * y_row + at[None, :]
    base = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (base + change * share[:, None]).to(y.dtype.element_ty), mask=mask)
# fmt: on
