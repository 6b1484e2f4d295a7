"""What adapters change of a step's rows, by kernels of our own where this machine has them."""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.calling import KINDS, Kernel
from serve_app.engine.cpu.sequence import Call
from serve_app.engine.decoder.openmp import libgomp
from serve_app.engine.lora.buckets import Part, new_stack
from serve_app.engine.lora.plan import Resident, ShelfTiles, lay_tiles

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

        machine = compiling.Machine.here()
        in_pairs = machine.has_pairs and dtype == torch.bfloat16
        numbers = of.Numbers(kind=KINDS[dtype], width=machine.width, in_pairs=in_pairs)
        self.tile_rows = of.TILE_ROWS
        self.most_rank = of.MOST_RANK
        self._inputs_at_once, self._width = numbers.inputs_at_once, numbers.width
        self._kernel = Kernel(compiling.compiled(of.emit, **asdict(numbers)), of.NAME)

    def takes(self, frame: Tensor) -> bool:
        """Whether changes of such a weight, [outputs, inputs], are computed so."""
        outputs, inputs = frame.shape
        return outputs % self._width == 0 and inputs % self._inputs_at_once == 0

    def adding(self, parts: Sequence[Part]) -> LowRankChanges:
        """What adds the changes of these linears."""
        return LowRankChanges(self._kernel, parts)


class LowRankChanges:
    """Those of some linears, as long as their stacks are these; it keeps them."""

    def __init__(self, kernel: Kernel, parts: Sequence[Part]) -> None:
        self._kernel = kernel
        self._parts = parts
        ranks = {rank for part in parts for rank in part.stacks}
        self._told = {rank: _told(rank, parts) for rank in ranks}

    def __call__(self, y: Tensor, x: Tensor, tiles: Iterable[ShelfTiles]) -> None:
        """Add to rows of y [tokens, out] what their adapters make of x [tokens, in]; no other row is touched."""
        assert y.stride(1) == 1, "a row of outputs is written where it lies"
        x = x if x.stride(1) == 1 else x.contiguous()
        inputs = x.shape[1]
        for each in tiles:
            if each.rank not in self._told:
                continue
            given, num_parts, outputs = self._told[each.rank]
            num_tiles = each.tiles.shape[1]
            self._kernel(
                num_parts, num_tiles, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0),
                each.rows.data_ptr(), each.factors.data_ptr(), each.tiles.data_ptr(), given.data_ptr(),
                inputs, each.rank, is_short=num_tiles * each.rank * (num_parts * inputs + outputs) <= SHORT,
            )  # fmt: skip

    def calls(self, y: Tensor, x: Tensor, ranks: Sequence[int]) -> list[tuple[int, Call]]:
        """The same, of rows at places that stay, but for what `parameters_of` tiles of such ranks are.

        Each with the number of the tiles that it is of; none for those that change nothing here.
        """
        from serve_app.engine.cpu import low_rank_kernel as of

        found = []
        for number, rank in enumerate(ranks):
            if rank in self._told:
                given, num_parts, _ = self._told[rank]
                known = {
                    "num_parts": num_parts, "x": x.data_ptr(), "x_stride": x.stride(0), "y": y.data_ptr(),
                    "y_stride": y.stride(0), "parts": given.data_ptr(), "num_inputs": x.shape[1], "rank": rank,
                }  # fmt: skip
                found.append((number, Call(kernel=self._kernel, names=of.PARAMETERS, given=known, keeps=self)))
        return found


def parameters_of(tiles: ShelfTiles) -> dict[str, int]:
    """What a call has to know of a step. They are there as long as the tiles are."""
    return {
        "num_tiles": tiles.tiles.shape[1],
        "rows": tiles.rows.data_ptr(),
        "factors": tiles.factors.data_ptr(),
        "tiles": tiles.tiles.data_ptr(),
    }


def _told(rank: int, parts: Sequence[Part]) -> tuple[Tensor, int, int]:
    """What the kernel is told of the parts that a shelf changes, how many there are, and outputs of all."""
    found = [(part.stacks[rank], part.begin, part.end - part.begin) for part in parts if rank in part.stacks]
    told = [[stack.down.data_ptr(), stack.up.data_ptr(), begin, outputs] for stack, begin, outputs in found]
    return torch.tensor(told), len(found), sum(outputs for _, _, outputs in found)


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
    kernels.adding(parts)(y, x, tiles or ())
    limit = TOLERANCES[dtype]
    return torch.allclose(y.float(), expected, rtol=limit, atol=limit)
