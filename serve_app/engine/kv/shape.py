"""What one position takes in the key/value store."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Keys and values of one position in one layer."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueShape:
    """Keys and values of one position, layer by layer; layers may differ."""

    layers: tuple[LayerShape, ...]

    @classmethod
    def uniform(cls, *, layers: int, heads: int, key_dim: int, value_dim: int) -> KeyValueShape:
        return cls(layers=(LayerShape(heads=heads, key_dim=key_dim, value_dim=value_dim),) * layers)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return sum(layer.num_elements for layer in self.layers) * dtype.itemsize
