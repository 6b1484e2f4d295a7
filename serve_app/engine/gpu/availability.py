"""Says whose attention kernels are used on a device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch


def choose_kernels(
    wanted: Literal["auto", "triton", "torch"], device: torch.device, *, is_paged: bool
) -> Literal["triton", "torch"]:
    """What "auto" comes to: Triton's on a GPU where they can be had, else torch's. Lanes have only torch's."""
    if not is_paged:
        return "torch"
    if wanted == "auto":
        return "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"
    return wanted
