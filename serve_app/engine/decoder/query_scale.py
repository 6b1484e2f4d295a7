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


def scales_queries(layer: Any) -> bool:
    """Whether an attention module's queries have a factor: Llama 4's layers without rotary embedding."""
    return bool(getattr(getattr(layer, "config", None), "attn_temperature_tuning", False)) and not layer.use_rope


def query_scale(layer: Any, positions: Tensor) -> Tensor:
    """The factor of each query of a layer that `scales_queries`, [tokens] float32.

    1 + attn_scale · log(1 + ⌊(position + 1) / floor_scale⌋), after arXiv 2501.19399.
    """
    steps = torch.floor((positions.float() + 1.0) / layer.floor_scale)
    scale: float = layer.attn_scale
    return torch.log1p(steps) * scale + 1.0
