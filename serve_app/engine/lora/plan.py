"""Plans which rows of a step each adapter changes, and with what factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from serve_app.engine.decoder.memory import sent

MAX_PADDED_ROWS = 16  # rows of one slot that may be padded to keep its neighbours company

Rows: TypeAlias = slice | Tensor

Mix: TypeAlias = tuple[tuple[int, float], ...]
"""Slots with the factor of each, which a row is computed with; () is the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """An adapter in a slot: the shelf of its rank, its place there, and whether it has DoRA's gains."""

    version: str
    rank: int
    place: int
    has_gain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Neighbouring places of a shelf, and as many of the picked rows for each of them.

    begin, end: of the picked rows, `num_places` times the same number
    """

    rank: int
    first_place: int
    num_places: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The rows of a step that have one more adapter, each with that one.

    picked:     rows in the order of the segments; some come twice, to make the places of a segment equally long
    kept:       positions among the picked ones that count, in the order of `rows`; None are all of them
    rows:       the adapted rows, none twice; the others are not touched
    factors:    [rows, 1] float32, of each row's change; None where all are 1
    gains:      rows with DoRA's gains; None where there are none
    """

    segments: tuple[Segment, ...]
    picked: Rows
    kept: Tensor | None
    rows: Rows
    factors: Tensor | None
    gains: Gains | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Rows with DoRA's gains.

    at: their positions among the rows of the pass;  rows: they themselves;  slots: theirs;  each [gain rows]
    """

    at: Tensor
    rows: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A step's adapted rows: the first adapter of each in the first pass, its second one in the next, and so on.

    So no pass has a row twice, and what a row's adapters add is added in the order of its mix, on any device.
    """

    num_tokens: int
    passes: tuple[Pass, ...]


def make_plan(mixes: Sequence[Mix], residents: Mapping[int, Resident], *, device: torch.device) -> Plan:
    """mixes: [tokens]"""
    depth = max(map(len, mixes), default=0)
    used = [{row: mix[at] for row, mix in enumerate(mixes) if len(mix) > at} for at in range(depth)]
    return Plan(num_tokens=len(mixes), passes=tuple(_pass(each, residents, device) for each in used))


def _pass(used: Mapping[int, tuple[int, float]], residents: Mapping[int, Resident], device: torch.device) -> Pass:
    """Group rows by slot, and slots whose places are neighbours and whose rows are about as many.

    used: by row, its slot and the factor
    """
    rows_of: dict[int, list[int]] = {}
    for row, (slot, _) in used.items():
        rows_of.setdefault(slot, []).append(row)
    segments: list[Segment] = []
    picked: list[int] = []
    position_of: dict[int, int] = {}
    for run in _runs(rows_of, residents):
        begin = len(picked)
        longest = max(len(rows_of[slot]) for slot in run)
        for slot in run:
            rows = rows_of[slot]
            position_of.update(zip(rows, range(len(picked), len(picked) + len(rows)), strict=True))
            picked += rows + rows[:1] * (longest - len(rows))
        first = residents[run[0]]
        segments.append(
            Segment(rank=first.rank, first_place=first.place, num_places=len(run), begin=begin, end=len(picked))
        )
    kept = [position_of[row] for row in used]
    return Pass(
        segments=tuple(segments),
        picked=_rows(picked, device),
        kept=None if kept == list(range(len(picked))) else sent(torch.tensor(kept), device),
        rows=_rows(list(used), device),
        factors=_factors([factor for _, factor in used.values()], device),
        gains=_gains(used, residents, device),
    )


def _factors(factors: list[float], device: torch.device) -> Tensor | None:
    if all(factor == 1 for factor in factors):
        return None
    return sent(torch.tensor(factors, dtype=torch.float32), device)[:, None]


def _gains(
    used: Mapping[int, tuple[int, float]], residents: Mapping[int, Resident], device: torch.device
) -> Gains | None:
    found = [(at, row, slot) for at, (row, (slot, _)) in enumerate(used.items()) if residents[slot].has_gain]
    if not found:
        return None
    at, rows, slots = sent(torch.tensor(found), device).T
    return Gains(at=at, rows=rows, slots=slots)


def _runs(rows_of: Mapping[int, Sequence[int]], residents: Mapping[int, Resident]) -> list[list[int]]:
    """Slots in runs: one shelf, one place after the other, and numbers of rows within a factor of two."""

    def key(slot: int) -> tuple[int, int, int]:
        num_rows = len(rows_of[slot])
        padded = 1 << (num_rows - 1).bit_length() if num_rows <= MAX_PADDED_ROWS else 0
        return residents[slot].rank, padded, residents[slot].place

    runs: list[list[int]] = []
    last: tuple[int, int, int] | None = None
    for slot in sorted(rows_of, key=key):
        rank, padded, place = key(slot)
        if padded and last == (rank, padded, place - 1):
            runs[-1].append(slot)
        else:
            runs.append([slot])
        last = (rank, padded, place)
    return runs


def _rows(rows: list[int], device: torch.device) -> Rows:
    """Neighbouring rows as a slice, which is not copied."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return sent(torch.tensor(rows), device)


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
