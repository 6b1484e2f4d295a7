"""The types that kernels take and give: rows, tiles, and bounds on a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One query: which packed token it is, and its keys, from a position of the storage on.

    elsewhere: positions from which its first stretches are read instead, where the same keys and values lie
    """

    token: int
    position: int
    num_keys: int
    elsewhere: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlay:
    """The tokens of a row that are in play: from a lowest to a highest logit, of these two those with such ids."""

    lowest: float = -inf
    highest: float = inf
    lowest_ids: tuple[int, int] = (0, torch.iinfo(torch.int32).max)
    highest_ids: tuple[int, int] = (0, torch.iinfo(torch.int32).max)


ALL = InPlay()


@dataclass(frozen=True, slots=True)
class Counted:
    """A row's distinct values by falling value, [n] float32, and how many tokens have each, [n] int64.

    others: [m] int64, ids of tokens whose values are not among them, as they need more than 16 bits
    """

    values: Tensor
    numbers: Tensor
    others: Tensor


class AdapterTiles(Protocol):
    """Rows of a step that adapters of one rank change, none twice.

    rows:    [rows] int32, in the order of their places;  factors: [rows] float32
    tiles:   [3, tiles] int32: of each its place, the first of its rows, how many
    """

    @property
    def rank(self) -> int: ...
    @property
    def rows(self) -> Tensor: ...
    @property
    def factors(self) -> Tensor: ...
    @property
    def tiles(self) -> Tensor: ...


class PagedTiles(Protocol):
    """A step's queries in tiles over block tables, as `serve_app.engine.kv.page_plans.Tiles` describes them."""

    @property
    def places(self) -> Tensor: ...
    @property
    def tables(self) -> Tensor: ...
    @property
    def singles(self) -> Tensor: ...
    @property
    def chunks(self) -> Tensor: ...


class PagedScoring(Protocol):
    """How keys are weighed: `scale`, and where there are any a window, chunks, a softcap and sinks."""

    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int | None: ...
    @property
    def chunk(self) -> int | None: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def sinks(self) -> Tensor | None: ...


class Factors(Protocol):
    """The factors of all adapters of one rank: down [places, rank, in], up [places, out, rank]."""

    @property
    def down(self) -> Tensor: ...
    @property
    def up(self) -> Tensor: ...


class AdaptedLinear(Protocol):
    """One of the linears whose outputs lie side by side: its columns begin … end-1, and its factors by rank."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def stacks(self) -> Mapping[int, Factors]: ...


Adding: TypeAlias = Callable[[Tensor, Tensor, Iterable[AdapterTiles]], None]
"""Adds to rows of y [tokens, out] what their adapters make of x [tokens, in]; touches no other row."""


class AdapterKernels(Protocol):
    """tile_rows: rows of a tile, at most"""

    tile_rows: int

    def adding(self, parts: Sequence[AdaptedLinear]) -> Adding:
        """Return what adds the changes of these linears; it keeps their factors."""


def bounds_of(in_play: Sequence[InPlay]) -> tuple[Tensor, Tensor]:
    """Return [n, 2] float32, the lowest and the highest logit, and [n, 4] int32, the first and last id of either."""
    bounds = torch.tensor([[each.lowest, each.highest] for each in in_play])
    return bounds, torch.tensor([[*each.lowest_ids, *each.highest_ids] for each in in_play], dtype=torch.int32)
