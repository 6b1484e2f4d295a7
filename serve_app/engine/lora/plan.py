"""Plans which rows of a step each adapter changes, and with what factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from serve_app.engine.decoder.memory import sent
from serve_app.kernels.forms import AdapterTiles

Mix: TypeAlias = tuple[tuple[int, float], ...]
"""Slots with the factor of each, which a row is computed with; () is the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """An adapter in a slot: the shelf of its rank, its place there, and whether it has DoRA's gains."""

    version: str
    rank: int
    place: int
    has_gain: bool


class Gains(NamedTuple):
    """Rows with DoRA's gains, none twice, with the slot and the factor of each.

    rows, slots: [gain rows] int64;  factors: [gain rows] float32
    """

    rows: Tensor
    slots: Tensor
    factors: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A step with adapted rows. gains: of the rows' first adapters, of their second ones, and so on"""

    num_tokens: int
    gains: tuple[Gains, ...] = ()


def find_gains(mixes: Sequence[Mix], residents: Mapping[int, Resident], *, device: torch.device) -> tuple[Gains, ...]:
    """mixes: [tokens]"""
    gains = []
    for at in range(max(map(len, mixes), default=0)):
        used = ((row, *mix[at]) for row, mix in enumerate(mixes) if len(mix) > at)
        if found := [each for each in used if residents[each[1]].has_gain]:
            gains.append(Gains(*(sent(torch.tensor(each), device) for each in zip(*found, strict=True))))
    return tuple(gains)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfRows:
    """As `AdapterTiles`, in the host's memory; tiles: of each its place, the first of its rows, how many."""

    rank: int
    rows: list[int]
    factors: list[float]
    tiles: list[tuple[int, int, int]]

    def tensors(self, device: torch.device) -> AdapterTiles:
        return AdapterTiles(
            rank=self.rank,
            rows=sent(torch.tensor(self.rows, dtype=torch.int32), device),
            factors=sent(torch.tensor(self.factors, dtype=torch.float32), device),
            tiles=sent(torch.tensor(self.tiles, dtype=torch.int32).T.contiguous(), device),
        )


def lay_tiles(
    mixes: Sequence[Mix], residents: Mapping[int, Resident], *, tile_rows: int, device: torch.device
) -> tuple[AdapterTiles, ...]:
    """As `lay_rows`, on the device."""
    return tuple(each.tensors(device) for each in lay_rows(mixes, residents, tile_rows=tile_rows))


def lay_rows(mixes: Sequence[Mix], residents: Mapping[int, Resident], *, tile_rows: int) -> tuple[ShelfRows, ...]:
    """The tiles of the rows' first adapters, then those of their second ones, and so on.

    So none has a row twice, and what a row's adapters add is added in the order of its mix.

    mixes: [tokens];  tile_rows: of a tile, at most
    """
    used = [[(row, *mix[at]) for row, mix in enumerate(mixes) if len(mix) > at] for at in range(max(map(len, mixes)))]
    return tuple(
        _of_shelf(rank, [row for row in each if residents[row[1]].rank == rank], residents, tile_rows)
        for each in used
        for rank in sorted({residents[slot].rank for _, slot, _ in each})
    )


def _of_shelf(
    rank: int, used: Sequence[tuple[int, int, float]], residents: Mapping[int, Resident], tile_rows: int
) -> ShelfRows:
    """used: row, slot and factor of each row"""
    ordered = sorted(used, key=lambda each: residents[each[1]].place)
    tiles: list[tuple[int, int, int]] = []
    for at, (_, slot, _) in enumerate(ordered):
        place = residents[slot].place
        if tiles and tiles[-1][0] == place and tiles[-1][2] < tile_rows:
            tiles[-1] = (place, tiles[-1][1], tiles[-1][2] + 1)
        else:
            tiles.append((place, at, 1))
    return ShelfRows(
        rank=rank, rows=[row for row, _, _ in ordered], factors=[factor for _, _, factor in ordered], tiles=tiles
    )
