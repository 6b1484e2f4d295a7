"""Which queries of a step attend together: rows of like length, over the keys of neighbouring places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_CHUNK_ROWS = 256
"""Queries of a chunk that are attended to at once, so that masks stay small."""
CALL_POSITIONS = 768
"""What one more call of attention costs, in positions of one sequence that could be read meanwhile (measured on CPUs
at 2 heads of 64 and at 2 of 32: 400 to 1200)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Queries of one sequence in a step, `length` of them from position `start` on.

    first_token: where they begin in the packed row
    place, blocks, names: of the sequence's holding
    """

    first_token: int
    place: int
    blocks: Sequence[int]
    start: int
    length: int
    names: Sequence[bytes] = ()

    @property
    def num_keys(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Queries attended to in one call: `length` of each row, over `num_keys` positions of each row from `first_key` on.

    rows:   which keys each row sees, as the storage says: places from … to, or a table of blocks [rows, blocks]
    tokens: the packed tokens of the queries, [rows * length] int64, or where they lie side by side, from … to
    filled: which rows are somebody's, int64; None is all. The others are places that happen to lie between
    starts: position of each row's first query, counted from the first key
    masks:  what was built for this step so far, by window, chunk and element type
    """

    rows: tuple[int, int] | Tensor
    tokens: tuple[int, int] | Tensor
    filled: Tensor | None
    length: int
    num_keys: int
    starts: tuple[int, ...]
    first_key: int = 0
    masks: dict[tuple[int | None, int | None, torch.dtype], Tensor | None] = field(default_factory=dict, compare=False)

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    def queries(self, packed: Tensor) -> Tensor:
        """The group's part of [tokens, heads, dim], as [rows, length, heads, dim]."""
        picked = packed[self.tokens[0] : self.tokens[1]] if isinstance(self.tokens, tuple) else packed[self.tokens]
        return picked.view(self.num_rows, self.length, *packed.shape[1:])

    def put(self, packed: Tensor, attended: Tensor) -> None:
        """Write [rows, length, heads, dim] to the group's tokens of [tokens, heads, dim]."""
        flat = attended.reshape(self.num_rows * self.length, *attended.shape[2:])
        if isinstance(self.tokens, tuple):
            packed[self.tokens[0] : self.tokens[1]] = flat
        elif self.filled is None:
            packed[self.tokens] = flat
        else:
            packed[self.tokens[self.filled]] = flat[self.filled]

    def mask(
        self, window: int | None, dtype: torch.dtype, device: torch.device, *, chunk: int | None = None
    ) -> Tensor | None:
        """What is added to the scores, [rows, 1, length, keys]: 0 where a query sees a key, else -inf; None is all 0.

        window: a query sees itself and so many positions before it less one; None sees all before it
        chunk:  a query sees nothing before the last multiple of it; None has no such border
        """
        if (window, chunk, dtype) not in self.masks:
            self.masks[window, chunk, dtype] = self._build_mask(window, chunk, dtype, device)
        return self.masks[window, chunk, dtype]

    def _build_mask(
        self, window: int | None, chunk: int | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        fits_window = window is None or self.num_keys <= window
        fits_chunk = chunk is None or self.num_keys <= chunk
        if self.length == 1 and fits_window and fits_chunk and all(start + 1 == self.num_keys for start in self.starts):
            return None
        starts = torch.tensor(self.starts, device=device)
        queries = starts[:, None] + torch.arange(self.length, device=device)  # [rows, length]
        keys = torch.arange(self.num_keys, device=device)
        hidden = keys > queries[:, :, None]
        if window is not None and not fits_window:
            hidden |= keys <= queries[:, :, None] - window
        if chunk is not None and not fits_chunk:
            hidden |= keys < (queries - queries % chunk)[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        return mask[:, None]


def tiles(reading: Reading, rows: tuple[int, int] | Tensor) -> list[Group]:
    """A chunk of one sequence, in pieces whose masks stay small."""
    groups = []
    for offset in range(0, reading.length, MAX_CHUNK_ROWS):
        length = min(MAX_CHUNK_ROWS, reading.length - offset)
        first, start = reading.first_token + offset, reading.start + offset
        groups.append(
            Group(
                rows=rows,
                tokens=(first, first + length),
                filled=None,
                length=length,
                num_keys=start + length,
                starts=(start,),
            )
        )
    return groups


def runs(readings: Sequence[Reading]) -> list[list[Reading]]:
    """Cut single queries, ordered by place, into runs that are cheaper to attend to together than apart.

    A run costs its longest row for each place from its first to its last, whether somebody's or not, and one call.
    """
    found: list[list[Reading]] = []
    num_rows = longest = 0
    for reading in readings:
        if found:
            wider = reading.place - found[-1][0].place + 1
            together = wider * max(longest, reading.num_keys)
            if together <= num_rows * longest + reading.num_keys + CALL_POSITIONS:
                found[-1].append(reading)
                num_rows, longest = wider, max(longest, reading.num_keys)
                continue
        found.append([reading])
        num_rows, longest = 1, reading.num_keys
    return found
