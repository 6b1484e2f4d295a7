"""Which of a step's tokens are parts of images, and how tokens are rotated whose positions have three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_app.engine.scheduler.sequence import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Illustrated:
    """As `Step` says; all None where no token is part of an image and none comes behind one."""

    embeddings: Tensor | None = None
    illustrated: Tensor | None = None
    rope_positions: Tensor | None = None


def lay_images(batch: Batch, positions: Sequence[int], *, device: torch.device) -> Illustrated:
    """Gather the rows of images in a batch's spans. positions: of all its tokens"""
    if all(span.sequence.illustration is None for span in batch.spans):
        return Illustrated()
    at: list[int] = []
    rows: list[Tensor] = []
    rotated: list[tuple[int, Tensor]] = []
    first = 0
    for span in batch.spans:
        held = span.sequence.illustration
        if held is not None:
            end = span.start + span.num_computed
            own_positions, own = held.between(span.start, end)
            at += [first + position - span.start for position in own_positions]
            rows.append(own)
            if (rope_positions := held.rope_between(span.start, end)) is not None:
                rotated.append((first, rope_positions))
        first += span.num_computed
    return Illustrated(
        embeddings=torch.cat(rows) if at else None,
        illustrated=torch.tensor(at, device=device) if at else None,
        rope_positions=_rope_positions(positions, rotated).to(device) if rotated else None,
    )


def _rope_positions(positions: Sequence[int], rotated: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Of the tokens that are none of these, all three are the position."""
    rope_positions = torch.tensor(positions).expand(3, -1).clone()
    for first, own in rotated:
        rope_positions[:, first : first + own.shape[1]] = own
    return rope_positions
