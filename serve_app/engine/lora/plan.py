"""Which rows of a step are computed with which places of which shelf, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

MAX_PADDED_ROWS = 16  # rows of one slot that may be padded to keep its neighbours company

Rows: TypeAlias = slice | Tensor


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
class Plan:
    """A step's adapted rows.

    picked:     rows in the order of the segments; some come twice, to make the places of a segment equally long
    kept:       positions among the picked ones that count, in the order of `rows`; None are all of them
    rows:       the adapted rows; the others are not touched
    gain_rows:  those with DoRA's gains, [gain rows], and `gain_slots` theirs; None where there are none
    """

    num_tokens: int
    segments: tuple[Segment, ...]
    picked: Rows
    kept: Tensor | None
    rows: Rows
    gain_rows: Tensor | None
    gain_slots: Tensor | None

    @property
    def num_columns(self) -> int:
        """Columns of `down` that a module computes: the ranks of the shelves of the slots present."""
        return sum(segment.rank * segment.num_places for segment in self.segments)


def make_plan(row_slots: Sequence[int], residents: Mapping[int, Resident], *, device: torch.device) -> Plan:
    """Group a step's rows by slot, and slots whose places are neighbours and whose rows are about as many.

    row_slots: [tokens], -1 for the base
    """
    rows_of: dict[int, list[int]] = {}
    for row, slot in enumerate(row_slots):
        if slot >= 0:
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
    rows = sorted(position_of)
    kept = [position_of[row] for row in rows]
    with_gain = [row for row in rows if residents[row_slots[row]].has_gain]
    return Plan(
        num_tokens=len(row_slots),
        segments=tuple(segments),
        picked=_rows(picked, device),
        kept=None if kept == list(range(len(picked))) else torch.tensor(kept, device=device),
        rows=_rows(rows, device),
        gain_rows=torch.tensor(with_gain, device=device) if with_gain else None,
        gain_slots=torch.tensor([row_slots[row] for row in with_gain], device=device) if with_gain else None,
    )


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
    return torch.tensor(rows, device=device)
