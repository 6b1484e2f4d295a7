"""The interface to all kernels. If a machine has none, a function returns None and torch computes the same.

`cpu/` (LLVM) and `gpu/` (Triton) are optional: without such a folder the service is slower, not broken. A kernel is
compared with torch before it is first used. This room knows tensors, and nothing of engines.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from serve_app.kernels.forms import AdapterKernels

if TYPE_CHECKING:
    from serve_app.kernels.cpu.products import LaidOut, WholeRows
    from serve_app.kernels.cpu.rows import RowsKernel
    from serve_app.kernels.cpu.tiles import TilesKernel

logger = logging.getLogger(__name__)

Kernels: TypeAlias = Literal["flashinfer", "triton", "torch"]
"""Whose kernels attend to pages."""


def attention_kernels(group: int, dim: int, dtype: torch.dtype) -> tuple[RowsKernel | None, TilesKernel | None]:
    """Return the kernels for single queries and for prompts, `group` heads of which share a key head of that size."""
    try:
        from serve_app.kernels.cpu.rows import rows_kernel
        from serve_app.kernels.cpu.tiles import tiles_kernel
    except ImportError:
        _tell()
        return None, None
    return rows_kernel(group, dim, dtype), tiles_kernel(group, dim, dtype)


def laid_out(packed: Tensor, bias: Tensor | None) -> LaidOut | None:
    """Return what multiplies by a weight [outputs, inputs] as oneDNN has laid it out;  bias: [outputs]"""
    found = _products()
    return None if found is None else found.LaidOut.find(packed, bias)


def may_read(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for such a weight if oneDNN lays it out as it does."""
    found = _products()
    return found is not None and found.LaidOut.may_read(shape, dtype)


def whole_rows(numbers: Tensor, scales: Tensor) -> WholeRows | None:
    """Return what multiplies by numbers [outputs, inputs] int8 with scales [outputs] float32."""
    found = _products()
    return None if found is None else found.WholeRows.find(numbers, scales)


def _products() -> Any:
    try:
        from serve_app.kernels.cpu import products
    except ImportError:
        _tell()
        return None
    return products


def adapter_kernels(
    frames: Iterable[Tensor], ranks: Iterable[int], *, device: torch.device, dtype: torch.dtype, uses_triton: bool
) -> AdapterKernels | None:
    """Return kernels for changes of such ranks to such weights [out, in]."""
    try:
        if uses_triton:
            from serve_app.kernels.gpu.lora import TritonKernels, agrees

            return TritonKernels() if agrees(dtype, device) else None
        from serve_app.kernels.cpu.low_rank import low_rank_kernels
    except ImportError:
        _tell()
        return None
    found = low_rank_kernels(dtype) if device.type == "cpu" else None
    is_so = found is not None and max(ranks) <= found.most_rank and all(map(found.takes, frames))
    return found if is_so else None


def paged_kernels() -> ModuleType:
    """Return Triton's kernels over pages. Raises ImportError where they, or Triton, are not here."""
    from serve_app.kernels.gpu import paged

    return paged


def has_package(name: str) -> bool:
    """Return whether a package is installed; of Triton, whether our kernels for it are here, too."""
    names = [name, "serve_app.kernels.gpu"] if name == "triton" else [name]
    return all(find_spec(each) is not None for each in names)


def choose_kernels(
    wanted: Literal["auto", "flashinfer", "triton", "torch"],
    device: torch.device,
    *,
    has: Callable[[str], bool] = has_package,
) -> list[Kernels]:
    """Return who is tried, one after the other; "auto" is the best that can be had on a GPU, else torch.

    On a CPU it is torch, too, where those of GPUs that are wanted are missing, so that one file serves both.

    has: whether a package is installed
    """
    if wanted != "auto" and (device.type != "cpu" or has(wanted)):
        return [wanted]
    if device.type != "cuda" or not has("triton"):  # FlashInfer leaves some layers and all graphs to Triton's
        return ["torch"]
    return ["flashinfer", "triton", "torch"] if has("flashinfer") else ["triton", "torch"]


@cache
def _tell() -> None:
    """Log, once, the import that just failed and what that costs."""
    logger.warning("Kernels of our own are missing (%s): torch computes the same, slower.", sys.exc_info()[1])
