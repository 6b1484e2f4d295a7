"""The seam between a layer's attention and where its keys and values are: a plan per step, a run per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scoring:
    """How a layer weighs the keys that a query sees.

    scale:   what scores are multiplied by
    window:  a query sees itself and so many positions before it less one; None sees all before it
    chunk:   a query sees nothing before the last multiple of it; None has no such border
    softcap: bounds the scores to ±softcap by tanh (Gemma 2, arXiv 2408.00118)
    sinks:   [heads], logits of nothing
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionPlan(Protocol):
    """What one step's attention has in common for all layers, made once by the storage that it reads."""

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        """Write one layer's new keys and values, if it has any, and attend to all that each query sees.

        layer: as the storage counts them
        query: [tokens, heads, key_dim];  key, value: [tokens, kv_heads, dim], in any strides; None where the layer
        reads what another has written

        Returns [tokens, heads, value_dim].
        """
        ...
