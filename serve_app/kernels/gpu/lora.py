"""LoRA on GPUs with Triton: two launches per linear, pass and rank, over tiles of rows of one adapter.

Segmented products after S-LoRA (arXiv 2311.03285) and Punica (arXiv 2310.18547). Sums are float32. The sum over the
inputs is cut at fixed places, so that no row's depends on its company.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_app.kernels.forms import AdaptedLinear, AdapterTiles, Adding, Factors, largest_error

logger = logging.getLogger(__name__)

SPLIT = 1024
"""Inputs that one program adds up."""
TILE_ROWS = 16
"""What tensor cores take at least."""
WIDTH = 128
"""Inputs, and outputs, that a program takes at a time."""


class TritonKernels:
    """Two launches for each linear, pass and rank."""

    tile_rows = TILE_ROWS

    def adding(self, parts: Sequence[AdaptedLinear]) -> Adding:
        """Return what adds the changes of these linears."""
        return functools.partial(self._add, parts)

    @staticmethod
    def _add(parts: Sequence[AdaptedLinear], y: Tensor, x: Tensor, tiles: Iterable[AdapterTiles]) -> None:
        x = x if x.stride(-1) == 1 else x.contiguous()
        for part in parts:
            for each in tiles:
                if each.rank in part.stacks:
                    _add(y[:, part.begin : part.end], x, each, part.stacks[each.rank])


def _add(y: Tensor, x: Tensor, each: AdapterTiles, stack: Factors) -> None:
    (_, rank, inputs), outputs = stack.down.shape, stack.up.shape[1]
    num_rows, num_tiles, splits = each.rows.shape[0], each.tiles.shape[1], -(-inputs // SPLIT)
    low = torch.empty(splits, num_rows, rank, dtype=torch.float32, device=x.device)
    shared = {"RANK": rank, "ROWS": TILE_ROWS, "WIDTH": WIDTH, "RANK_WIDTH": max(16, rank)}
    shrink[(num_tiles, splits)](
        x, stack.down, low, each.rows, each.tiles, num_tiles, num_rows, x.stride(0), IN=inputs, SPLIT=SPLIT, **shared
    )
    expand[(num_tiles, -(-outputs // WIDTH))](
        y, stack.up, low, each.rows, each.factors, each.tiles, num_tiles, num_rows, y.stride(0), *stack.up.stride(),
        OUT=outputs, SPLITS=splits, **shared,
    )  # fmt: skip


def agrees(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernels compile here and give what torch gives; a warning says why not."""
    try:
        error = largest_error(TritonKernels(), dtype, device)
    except Exception as failure:  # compilers of kernels fail in ways of their own
        logger.warning("changes of adapters are torch's, as Triton's kernels do not run: %s", failure)
        return False
    is_right = error <= (1e-4 if dtype == torch.float32 else 0.05)
    if not is_right:
        logger.warning("changes of adapters are torch's, as Triton's kernels are off by %.2g", error)
    return is_right


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
