"""Memory for passes over a vocabulary, used for row after row: fresh memory costs more than most passes do."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Tensors known by what they hold. Whoever takes a name again overwrites what it held.

    num_taken_anew: how often memory was asked of the system, which ends when every size has been seen
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self.num_taken_anew = 0

    def take(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the shape of `like` on its device; it holds anything."""
        return self.of_size(name, like.numel(), dtype, like.device).view(like.shape)

    def copy(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values, converted."""
        return self.take(name, values, dtype).copy_(values)

    def of_size(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[size], holding anything."""
        known = self._tensors.get((name, dtype, device))
        if known is None or len(known) < size:
            self.num_taken_anew += 1
            known = self._tensors[name, dtype, device] = torch.empty(size, dtype=dtype, device=device)
        return known[:size]
