"""An image on its way into a prompt: as it was read, and as it was seen."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from serve_app.engine.vision.kinds import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """An image that was decoded, and is to be seen.

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
class Seen:
    """An image as a prompt holds it. rows: [num_rows, hidden], on the model's device; the rest as in `Read`."""

    digest: bytes
    text: str
    grid: tuple[int, int] | None
    rows: Tensor

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * self.rows.itemsize
