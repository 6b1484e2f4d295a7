"""The images of a prompt: decoded images, their embeddings, and their places among a sequence's tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import shake_128
from itertools import accumulate

import torch
from torch import Tensor

from serve_app.engine.vision.support import Inputs

MAX_NAME = (1 << 62) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedImage:
    """A decoded image, ready for the vision tower.

    digest: of its file
    text:   what stands in a text for it, `num_rows` markers among it
    grid:   rows and columns of its embeddings, where positions follow them
    inputs: of the tower
    """

    digest: bytes
    text: str
    num_rows: int
    grid: tuple[int, int] | None
    inputs: Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEmbeddings:
    """An encoded image. rows: [num_rows, hidden], on the model's device; the rest as in `DecodedImage`."""

    digest: bytes
    text: str
    grid: tuple[int, int] | None
    rows: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * self.rows.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImages:
    """The images of one prompt. Its sequences share it.

    rows:       [image tokens, hidden], in the order of `positions`
    positions:  of the prompt's tokens that have a row in the place of their embedded id, ascending
    names:      the prompt's ids, but at those positions what the image's digest makes of each: blocks are named by them
    rope_positions: [3, prompt] int64, by which time, height and width are rotated; None where positions say all
    rope_shift: what is added to the position of a token behind the prompt, to rotate it
    """

    rows: Tensor
    positions: tuple[int, ...]
    names: tuple[int, ...]
    rope_positions: Tensor | None = None
    rope_shift: int = 0

    def between(self, start: int, end: int) -> tuple[tuple[int, ...], Tensor]:
        """Return the image positions within a span, and their rows."""
        first, last = bisect_left(self.positions, start), bisect_left(self.positions, end)
        return self.positions[first:last], self.rows[first:last]

    def rope_between(self, start: int, end: int) -> Tensor | None:
        """Return the rope positions of a span, [3, length]; None where they are the plain positions."""
        if self.rope_positions is None:
            return None
        length = self.rope_positions.shape[1]
        behind = torch.arange(max(start, length), max(end, length)) + self.rope_shift
        return torch.cat([self.rope_positions[:, start:end], behind.expand(3, -1)], dim=1)


def place_images(token_ids: Sequence[int], seen: Sequence[ImageEmbeddings], *, token_id: int) -> PlacedImages | None:
    """Put the rows of images where a prompt has the image token.

    Return None if there are not as many of these as rows: the prompt itself wrote that token.
    """
    positions = tuple(position for position, each in enumerate(token_ids) if each == token_id)
    if len(positions) != sum(len(each.rows) for each in seen):
        return None
    names, first = list(token_ids), 0
    for each in seen:
        for position, name in zip(positions[first:], _names(each), strict=False):
            names[position] = name
        first += len(each.rows)
    rope_positions = _rope_positions(len(token_ids), positions, seen) if any(each.grid for each in seen) else None
    return PlacedImages(
        rows=seen[0].rows if len(seen) == 1 else torch.cat([each.rows for each in seen]),
        positions=positions,
        names=tuple(names),
        rope_positions=rope_positions,
        rope_shift=0 if rope_positions is None else int(rope_positions.max()) + 1 - len(token_ids),
    )


def _names(seen: ImageEmbeddings) -> list[int]:
    """Return a name for each row that no token and no other image has."""
    words = array("Q", shake_128(seen.digest).digest(8 * len(seen.rows)))
    return [-1 - (word & MAX_NAME) for word in words]


def _rope_positions(length: int, positions: Sequence[int], seen: Sequence[ImageEmbeddings]) -> Tensor:
    """Return the positions in time, height and width, [3, prompt] (Qwen2-VL, arXiv 2409.12191).

    Text advances all three by one. An image stands still in time. The text behind it begins after its longer side.
    """
    starts = [positions[first] for first in accumulate((len(each.rows) for each in seen[:-1]), initial=0)]
    pieces: list[Tensor] = []
    reached = done = 0
    for start, each in zip(starts, seen, strict=True):
        assert each.grid is not None, "a model has grids of all its images, or of none"
        height, width = each.grid
        pieces.append((torch.arange(start - done) + reached).expand(3, -1))
        reached += start - done
        rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
        pieces.append(torch.stack([torch.zeros_like(rows), rows, columns]) + reached)
        reached += max(height, width)
        done = start + height * width
    pieces.append((torch.arange(length - done) + reached).expand(3, -1))
    return torch.cat(pieces, dim=1)
