"""Queries that are scaled by their position: by the step's positions, where a model would count its own rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def take_over_scales(module: nn.Module) -> None:
    """Let no attention module scale its queries by itself: it counts a packed row from zero."""
    for layer in module.modules():
        if getattr(layer, "attn_temperature_tuning", False):
            layer.attn_temperature_tuning = False  # type: ignore[assignment]


def query_scale(layer: Any, positions: Tensor) -> Tensor | None:
    """The factor of each query, [tokens] float32, where the model asks for one; None is 1 for all.

    Llama 4's layers without rotary embedding: 1 + attn_scale · log(1 + ⌊(position + 1) / floor_scale⌋), after
    arXiv 2501.19399.
    """
    if not getattr(getattr(layer, "config", None), "attn_temperature_tuning", False) or layer.use_rope:
        return None
    steps = torch.floor((positions.float() + 1.0) / layer.floor_scale)
    scale: float = layer.attn_scale
    return torch.log1p(steps) * scale + 1.0
