"""Changes of adapters to a step's rows by kernels: two launches per module, pass and shelf."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from serve_app.engine.gpu.lora_kernels import expand, shrink
from serve_app.engine.lora.buckets import Part, Stack
from serve_app.engine.lora.plan import Adding, Resident, ShelfTiles, lay_tiles

logger = logging.getLogger(__name__)

SPLIT = 1024
"""Inputs that one program adds up."""
TILE_ROWS = 16
"""What tensor cores take at least."""
WIDTH = 128
"""Inputs, and outputs, that a program takes at a time."""


class TritonKernels:
    """Two launches for each linear, pass and shelf."""

    tile_rows = TILE_ROWS

    def adding(self, parts: Sequence[Part]) -> Adding:
        """What adds the changes of these linears."""
        return functools.partial(self._add, parts)

    @staticmethod
    def _add(parts: Sequence[Part], y: Tensor, x: Tensor, tiles: Iterable[ShelfTiles]) -> None:
        x = x if x.stride(-1) == 1 else x.contiguous()
        for part in parts:
            for each in tiles:
                if each.rank in part.stacks:
                    _add(y[:, part.begin : part.end], x, each, part.stacks[each.rank])


def _add(y: Tensor, x: Tensor, each: ShelfTiles, stack: Stack) -> None:
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


@torch.no_grad()
def agrees(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels compile here, and give of some rows what torch gives; a warning says why not."""
    generator = torch.Generator().manual_seed(1)
    down, up, x, y = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((2, 8, 200), (2, 150, 8), (3, 200), (3, 150))
    )
    residents = {slot: Resident(version="", rank=8, place=slot, has_gain=False) for slot in range(2)}
    expected = y.float()
    for row, slot in ((0, 1), (2, 0)):
        expected[row] += 0.5 * up[slot].float() @ (down[slot].float() @ x[row].float())
    try:
        tiles = lay_tiles([((1, 0.5),), (), ((0, 0.5),)], residents, tile_rows=TILE_ROWS, device=device)
        part = Part(begin=0, end=y.shape[1], stacks={8: Stack(down=down, up=up)})
        TritonKernels().adding([part])(y, x, tiles or ())
        difference = float((y.float() - expected).abs().max())
    except Exception as error:  # compilers of kernels fail in ways of their own
        logger.warning("changes of adapters are torch's, as Triton's kernels do not run: %s", error)
        return False
    limit = (1e-4 if dtype == torch.float32 else 0.05) * float(expected.abs().max())
    if not difference <= limit:
        logger.warning("changes of adapters are torch's, as Triton's kernels are off by %.2g", difference)
    return difference <= limit
