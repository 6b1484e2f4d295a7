"""Says whose attention kernels are used on a device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch

Kernels: TypeAlias = Literal["flashinfer", "triton", "torch"]


def choose_kernels(
    wanted: Literal["auto", "flashinfer", "triton", "torch"],
    device: torch.device,
    *,
    is_paged: bool,
    has: Callable[[str], bool] = lambda package: find_spec(package) is not None,
) -> list[Kernels]:
    """Who is tried, one after the other; "auto" is the best that can be had on a GPU, else torch. Lanes have only
    torch's.

    has: whether a package is installed
    """
    if not is_paged:
        return ["torch"]
    if wanted != "auto":
        return [wanted]
    if device.type != "cuda" or not has("triton"):  # FlashInfer leaves some layers and all graphs to Triton's
        return ["torch"]
    return ["flashinfer", "triton", "torch"] if has("flashinfer") else ["triton", "torch"]
