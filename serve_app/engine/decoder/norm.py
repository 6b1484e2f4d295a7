"""Norms of llama-like models, in as few operations as is fastest, and what is added to the stream before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm: TypeAlias = Callable[[Tensor], Tensor]
"""Of the last dimension, out of place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be added to the stream, [tokens, hidden], times a factor."""

    amount: Tensor
    factor: float

    def add_to(self, x: Tensor) -> None:
        x.add_(self.amount, alpha=self.factor)


def added_and_normed(x: Tensor, change: Change | None, norm: Norm | None) -> Tensor:
    """Add a change to the stream, in place, and give the norm of that; without one the stream itself."""
    if change is not None:
        change.add_to(x)
    return x if norm is None else norm(x)


class RootMeanSquare:
    """x / √(mean(x²) + eps) · weight (arXiv 1910.07467), computed in float32.

    1.2 to 1.4 times as fast as `F.rms_norm`, which takes the same for a mean as for every other operation.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: [size] float32"""
        size = weight.shape[0]
        self._weight: Tensor = weight * size**0.5  # of the sum of squares, where the mean is meant
        self._eps = eps * size

    def __call__(self, x: Tensor) -> Tensor:
        exact = x.float()
        factor: Tensor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().add_(self._eps).rsqrt_()
        return (exact * factor).mul_(self._weight).to(x.dtype)


class CentredNorm:
    """A layer norm that has learned nothing (OLMo)."""

    def __init__(self, size: int, eps: float) -> None:
        self._shape = (size,)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self._shape, eps=self._eps).to(x.dtype)


def norm_of(module: Any, *, offset: float) -> Norm | None:
    """How a norm of transformers computes; None for one of another kind.

    offset: what is added to its weight (Gemma keeps what is over one)
    """
    if not isinstance(module, nn.Module):
        return None
    kind = type(module).__name__
    if kind == "OlmoLayerNorm":
        return CentredNorm(int(module.normalized_shape[0]), 1e-5)  # type: ignore[index]
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not kind.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    return RootMeanSquare(weight.detach().float() + offset, eps)
