"""Which kernels of ours compute what adapters change, if any."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from serve_app.engine.lora.shelf import Part
from serve_app.engine.lora.tiles import Adding


class Kernels(Protocol):
    """tile_rows: rows of a tile, at most"""

    tile_rows: int

    def adding(self, parts: Sequence[Part]) -> Adding:
        """What adds the changes of these linears; it keeps their stacks."""


def kernels_for(
    frames: Collection[Tensor], ranks: Collection[int], *, device: torch.device, dtype: torch.dtype, uses_triton: bool
) -> Kernels | None:
    """Kernels for changes of such ranks to such weights [out, in]; None where torch computes them."""
    if uses_triton:
        from serve_app.engine.gpu.lora import TritonKernels, agrees

        return TritonKernels() if agrees(dtype, device) else None
    if device.type != "cpu":
        return None
    from serve_app.engine.cpu.low_rank import low_rank_kernels

    found = low_rank_kernels(dtype)
    is_so = found is not None and max(ranks) <= found.most_rank and all(map(found.takes, frames))
    return found if is_so else None
