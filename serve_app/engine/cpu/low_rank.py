"""What adapters change of a step's rows, by kernels of our own where this machine has them."""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.calling import KINDS, Kernel
from serve_app.engine.lora.plan import Resident
from serve_app.engine.lora.shelf import Part, new_stack
from serve_app.engine.lora.tiles import ShelfTiles, lay_tiles
from serve_app.engine.openmp import libgomp

logger = logging.getLogger(__name__)

SHORT = 1 << 18
"""Numbers of factors that one thread multiplies by in the time that it takes to wake another."""
TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 3e-3, torch.float32: 1e-5}
"""Of results that are about one, by which they may differ from torch's."""


class LowRankKernels:
    """For factors of one type of numbers, of which `up` lies in memory as [places, rank, outputs]."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises RuntimeError, or OSError, where none can be made."""
        from serve_app.engine.cpu import low_rank_kernel as of

        numbers = of.Numbers(
            kind=KINDS[dtype],
            width=compiling.Machine.here().width,
            in_pairs=dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported(),
        )
        self.tile_rows = of.TILE_ROWS
        self.most_rank = of.MOST_RANK
        self._inputs_at_once, self._width = numbers.inputs_at_once, numbers.width
        self._kernel = Kernel(compiling.compiled(of.emit(numbers)), of.NAME)

    def takes(self, frame: Tensor) -> bool:
        """Whether changes of such a weight, [outputs, inputs], are computed so."""
        outputs, inputs = frame.shape
        return outputs % self._width == 0 and inputs % self._inputs_at_once == 0

    def add(self, y: Tensor, x: Tensor, parts: Sequence[Part], tiles: Iterable[ShelfTiles]) -> None:
        """Add to rows of y [tokens, out] what their adapters make of x [tokens, in]; no other row is touched."""
        x = x if x.stride(1) == 1 else x.contiguous()
        for each in tiles:
            found = [(part, part.stacks[each.rank]) for part in parts if each.rank in part.stacks]
            told = [
                number
                for part, stack in found
                for number in (stack.down.data_ptr(), stack.up.data_ptr(), part.begin, part.end - part.begin)
            ]
            if not told:
                continue
            given, num_tiles = torch.tensor(told), each.tiles.shape[1]
            columns = sum(x.shape[1] + part.end - part.begin for part, _ in found)
            self._kernel(
                len(found) * num_tiles, num_tiles, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0),
                each.rows.data_ptr(), each.factors.data_ptr(), each.tiles.data_ptr(), given.data_ptr(),
                x.shape[1], each.rank, is_short=num_tiles * each.rank * columns <= SHORT,
            )  # fmt: skip


@functools.cache
def low_rank_kernels(dtype: torch.dtype) -> LowRankKernels | None:
    """The kernels for factors of that type; None where this machine has none. They are tried beside torch first."""
    if dtype not in KINDS or libgomp() is None:
        return None
    try:
        kernels = LowRankKernels(dtype)
    except (ImportError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("changes of adapters are torch's: no kernels could be made (%s)", error)
        return None
    if not _are_right(kernels, dtype):
        logger.warning("changes of adapters are torch's: the kernels in %s are wrong", dtype)
        return None
    return kernels


@torch.inference_mode()
def _are_right(kernels: LowRankKernels, dtype: torch.dtype) -> bool:
    draw = torch.Generator().manual_seed(0)
    sizes, rank, inputs = (80, 16), 8, 96
    residents = {slot: Resident(version="", rank=rank, place=slot, has_gain=False) for slot in range(2)}
    mixes = [((row % 2, 0.5 + row),) if row != 3 else () for row in range(9)]
    x, y = (torch.randn(len(mixes), size, generator=draw).to(dtype) for size in (inputs, sum(sizes)))
    parts, expected, begin = [], y.float().clone(), 0
    for outputs in sizes:
        stack = new_stack(2, rank, torch.empty(outputs, inputs, dtype=dtype))
        for factor, size in ((stack.down, inputs), (stack.up, rank)):
            factor.copy_(torch.randn(factor.shape, generator=draw) / size**0.5)
        for row, mix in enumerate(mixes):
            for slot, share in mix:
                low = stack.down[slot].float() @ x[row].float()
                expected[row, begin : begin + outputs] += share * (stack.up[slot].float() @ low)
        parts.append(Part(begin=begin, end=begin + outputs, stacks={rank: stack}))
        begin += outputs
    tiles = lay_tiles(mixes, residents, tile_rows=kernels.tile_rows, device=x.device)
    kernels.add(y, x, parts, tiles or ())
    limit = TOLERANCES[dtype]
    return torch.allclose(y.float(), expected, rtol=limit, atol=limit)
