"""A step's adapted rows as kernels read them: per pass and shelf, rows of one adapter in tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.decoder.host_copies import sent
from serve_app.engine.lora.plan import Mix, Resident


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfTiles:
    """Rows of a step that one shelf changes, none twice.

    rows:    [rows] int32, in the order of their places
    factors: [rows] float32
    tiles:   [3, tiles] int32: of each its place, the first of its rows, how many
    """

    rank: int
    rows: Tensor
    factors: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfRows:
    """The same in the host's memory; tiles: of each its place, the first of its rows, how many."""

    rank: int
    rows: list[int]
    factors: list[float]
    tiles: list[tuple[int, int, int]]

    def tensors(self, device: torch.device) -> ShelfTiles:
        return ShelfTiles(
            rank=self.rank,
            rows=sent(torch.tensor(self.rows, dtype=torch.int32), device),
            factors=sent(torch.tensor(self.factors, dtype=torch.float32), device),
            tiles=sent(torch.tensor(self.tiles, dtype=torch.int32).T.contiguous(), device),
        )


def lay_tiles(
    mixes: Sequence[Mix], residents: Mapping[int, Resident], *, tile_rows: int, device: torch.device
) -> tuple[ShelfTiles, ...] | None:
    """As `lay_rows`, on the device."""
    found = lay_rows(mixes, residents, tile_rows=tile_rows)
    return None if found is None else tuple(each.tensors(device) for each in found)


def lay_rows(
    mixes: Sequence[Mix], residents: Mapping[int, Resident], *, tile_rows: int
) -> tuple[ShelfRows, ...] | None:
    """The tiles of all passes, those of the rows' first adapters first; None where DoRA's gains are among them.

    mixes: [tokens];  tile_rows: of a tile, at most
    """
    used = [[(row, *mix[at]) for row, mix in enumerate(mixes) if len(mix) > at] for at in range(max(map(len, mixes)))]
    if any(residents[slot].has_gain for each in used for _, slot, _ in each):
        return None
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
