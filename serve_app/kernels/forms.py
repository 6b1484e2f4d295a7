"""What kernels are given and give: rows and tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

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
