"""Chooses the numbers in which a model computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from serve_app.kernels.torch_private import onednn_has


def choose_dtype(
    asked: str,
    own: torch.dtype | None,
    device: torch.device,
    *,
    is_fast: Callable[[torch.dtype], bool] | None = None,
) -> torch.dtype:
    """What was asked for; for "auto" the checkpoint's own, but float32 on a CPU that has to emulate that.

    is_fast: whether the CPU multiplies matrices of this type; None asks the one we run on

    Without AVX-512, AMX or their like a product in bfloat16 takes several times as long as in float32: on AVX2, by a
    matrix of 896 × 4864, 3 times for one row and 4 times for 256.
    """
    if asked != "auto":
        named: torch.dtype = getattr(torch, asked)
        return named
    if own is None:
        return torch.float32
    if device.type != "cpu" or own.itemsize >= torch.float32.itemsize or (is_fast or cpu_is_fast)(own):
        return own
    return torch.float32


def cpu_is_fast(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products of this type of 16 bits."""
    return torch.backends.mkldnn.is_available() and onednn_has(dtype)
