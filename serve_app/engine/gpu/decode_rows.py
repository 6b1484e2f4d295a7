"""Tensors that stay where they are, filled anew for every step that decodes one token of each of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_app.engine.decoder.crossing import send_into
from serve_app.engine.decoder.step import Layout
from serve_app.engine.gpu.tiles import Tiles
from serve_app.engine.lora.plan import ShelfRows, ShelfTiles

NOWHERE = -1
"""The place of a row that nobody has: nothing of it is written, and nothing attended to."""


class DecodeRows:
    """Room for the numbers of `size` rows; those beyond a step's own are nobody's.

    token_ids, positions, places: [size] int64, as in `Step`
    """

    def __init__(self, size: int, *, ranks: Sequence[int], device: torch.device) -> None:
        """ranks: of the shelves whose adapters the rows may have, one adapter each"""
        self.size = size
        self._ranks = tuple(ranks)
        self._wide = torch.empty(3 * size, dtype=torch.int64, device=device)
        self._narrow = torch.empty(size * (4 + 5 * len(ranks)), dtype=torch.int32, device=device)
        self.token_ids, self.positions, self.places = self._wide.view(3, size)
        self.clear()

    def tiles(self, tables: Tensor) -> Tiles:
        """A tile of one query for each row; tables: by place"""
        singles, chunks = self._narrow[: 4 * self.size].view(4, self.size), self._narrow[:0].view(4, 0)
        return Tiles(places=self.places, tables=tables, singles=singles, chunks=chunks)

    def shelf_tiles(self) -> tuple[ShelfTiles, ...]:
        """Of each rank, as many tiles as there are rows."""
        found = []
        for number, rank in enumerate(self._ranks):
            own = self._narrow[self.size * (4 + 5 * number) : self.size * (9 + 5 * number)].view(5, self.size)
            found.append(ShelfTiles(rank=rank, rows=own[0], factors=own[1].view(torch.float32), tiles=own[2:]))
        return tuple(found)

    def clear(self) -> None:
        """Leave all rows to nobody."""
        self._send([], [], [], singles=[], shelves=())

    def fill(self, layout: Layout, shelves: Sequence[ShelfRows]) -> None:
        """Take a step's numbers, in two copies; shelves: of some of the ranks, each once"""
        singles = [(each.place, each.first_token, each.start, 1) for each in layout.readings]
        self._send(layout.token_ids, layout.positions, layout.places, singles=singles, shelves=shelves)

    def _send(
        self,
        token_ids: list[int],
        positions: list[int],
        places: list[int],
        *,
        singles: list[tuple[int, int, int, int]],
        shelves: Sequence[ShelfRows],
    ) -> None:
        size, free = self.size, range(len(token_ids), self.size)
        wide = [*token_ids, *(0 for _ in free), *positions, *(0 for _ in free), *places, *(NOWHERE for _ in free)]
        tiles = [*singles, *((0, row, 0, 0) for row in free)]
        narrow = torch.zeros(4 + 5 * len(self._ranks), size, dtype=torch.int32)
        narrow[:4] = torch.tensor(tiles, dtype=torch.int32).T
        for each in shelves:
            _lay(narrow[4 + 5 * self._ranks.index(each.rank) :][:5], each)
        send_into(self._wide, torch.tensor(wide, dtype=torch.int64))
        send_into(self._narrow, narrow.flatten())


def _lay(own: Tensor, each: ShelfRows) -> None:
    """Put a shelf's rows into [5, size] int32: rows, factors by their bits, tiles; the other tiles are empty."""
    own[0, : len(each.rows)] = torch.tensor(each.rows, dtype=torch.int32)
    own[1, : len(each.factors)] = torch.tensor(each.factors, dtype=torch.float32).view(torch.int32)
    own[2:, : len(each.tiles)] = torch.tensor(each.tiles, dtype=torch.int32).T
