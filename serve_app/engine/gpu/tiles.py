"""A step's queries in tiles, as whoever attends to pages reads them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Queries in tiles, as the kernels read them.

    places: [tokens] int64, where new keys and values are written; negative is nowhere
    tables: [rows, blocks] int32, block tables
    singles, chunks: [4, tiles] int32: of each tile its table's row, its first token, that one's position, how many
                     queries; a single is one query, or none
    """

    places: Tensor
    tables: Tensor
    singles: Tensor
    chunks: Tensor
