"""What kernels take and give: stretches, tiles, the scoring of keys; and the check of kernels for adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Queries of one sequence, side by side: which packed token is the first, and where its keys begin.

    bounds: of each query the first key that it sees, and one behind the last, from `position` on
    """

    token: int
    position: int
    bounds: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTiles:
    """Rows of a step that adapters of one rank change, none twice.

    rows:    [rows] int32, in the order of their places;  factors: [rows] float32
    tiles:   [3, tiles] int32: of each its place, the first of its rows, how many
    """

    rank: int
    rows: Tensor
    factors: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A step's queries in tiles over block tables.

    places: [tokens] int64, where new keys and values are written; negative is nowhere
    tables: [rows, blocks] int32, block tables
    singles, chunks: [4, tiles] int32: of each tile its table's row, its first token, that one's position, how many
                     queries; a single is one query, or none
    """

    places: Tensor
    tables: Tensor
    singles: Tensor
    chunks: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scoring:
    """How a layer weighs the keys that a query sees.

    scale:   what scores are multiplied by
    window:  a query sees itself and so many positions before it less one; None sees all before it
    chunk:   a query sees nothing before the last multiple of it; None has no such border
    softcap: bounds the scores to ±softcap by tanh (Gemma 2, arXiv 2408.00118)
    sinks:   [heads], logits of nothing
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The factors of all adapters of one rank: down [places, rank, in], up [places, out, rank]."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLinear:
    """One of the linears whose outputs lie side by side: its columns begin … end-1, and its factors by rank."""

    begin: int
    end: int
    stacks: Mapping[int, Factors]


Adding: TypeAlias = Callable[[Tensor, Tensor, Iterable[AdapterTiles]], None]
"""Adds to rows of y [tokens, out] what their adapters make of x [tokens, in]; touches no other row."""


class AdapterKernels(Protocol):
    """tile_rows: rows of a tile, at most"""

    tile_rows: int

    def adding(self, parts: Sequence[AdaptedLinear]) -> Adding:
        """Return what adds the changes of these linears; it keeps their factors."""


class PlainKernels:
    """Has torch compute the changes, adapter by adapter: the reference, and what is there without kernels."""

    tile_rows = 1 << 16

    def adding(self, parts: Sequence[AdaptedLinear]) -> Adding:
        return partial(_add_plainly, parts)


def _add_plainly(parts: Sequence[AdaptedLinear], y: Tensor, x: Tensor, tiles: Iterable[AdapterTiles]) -> None:
    for each in tiles:
        for place, first, count in each.tiles.T.tolist():
            rows, factors = (some[first : first + count] for some in (each.rows.long(), each.factors[:, None]))
            for part in parts:
                if (stack := part.stacks.get(each.rank)) is not None:
                    low = x[rows] @ stack.down[place].T * factors
                    y[rows, part.begin : part.end] += low.to(y.dtype) @ stack.up[place].T


@torch.no_grad()
def largest_error(kernels: AdapterKernels, dtype: torch.dtype, device: torch.device) -> float:
    """Return how far the kernels' outputs y are from torch's, in parts of 1 + |y|, for two tiles of some rows."""
    draw = torch.Generator().manual_seed(0)
    sizes, rank, inputs, place = (144, 16), 8, 224, 1

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, dtype)

    x, y = drawn(9, inputs), drawn(9, sum(sizes))
    rows, factors = torch.tensor([0, 1, 2, 4, 5, 7, 8], dtype=torch.int32, device=device), torch.arange(7.0) + 0.5
    table = torch.tensor([[place, place], [0, 4], [4, 3]], dtype=torch.int32, device=device)
    parts, expected, begin = list[AdaptedLinear](), y.float().clone(), 0
    for outputs in sizes:
        down, up = drawn(2, rank, inputs) / inputs**0.5, drawn(2, rank, outputs) / rank**0.5
        low = x[rows.long()].float() @ down[place].float().T * factors.to(device)[:, None]
        expected[rows.long(), begin : begin + outputs] += low @ up[place].float()
        stacks = {rank: Factors(down=down, up=up.mT)}
        parts.append(AdaptedLinear(begin=begin, end=begin + outputs, stacks=stacks))
        begin += outputs
    kernels.adding(parts)(y, x, [AdapterTiles(rank=rank, rows=rows, factors=factors.to(device), tiles=table)])
    return float(((y.float() - expected).abs() / (1 + expected.abs())).max())
