"""What one position takes in the key/value store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """Keys and values of one position, layer by layer; layers may differ.

    layers: what is kept, in the order of the model's layers
    places: where in `layers` the keys and values of a model's layer are, by the layer's number, where that is not the
            number itself: layers that attend to an earlier one's, and those behind a layer that keeps none
    readers: layers that attend to what another has written
    """

    layers: tuple[LayerShape, ...]
    places: Mapping[int, int] = field(default_factory=dict)
    readers: frozenset[int] = frozenset()

    @classmethod
    def uniform(cls, *, layers: int, heads: int, key_dim: int, value_dim: int) -> KeyValueShape:
        return cls(layers=(LayerShape(heads=heads, key_dim=key_dim, value_dim=value_dim),) * layers)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return sum(layer.num_elements for layer in self.layers) * dtype.itemsize
