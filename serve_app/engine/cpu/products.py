"""Products of few rows with weights that oneDNN has laid out, by a kernel of our own where this machine has one."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from typing import Any

import torch
from torch import Tensor

from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.calling import team_call
from serve_app.engine.openmp import libgomp

logger = logging.getLogger(__name__)

MAX_ROWS = 64
"""Beyond so many oneDNN multiplies as fast. With two cores and 20 GB/s this takes, of oneDNN's time, 0.67 for one row,
0.78 for 8, 0.7 for 16, 0.8 for 32 and 0.95 for 60 (the linears of Qwen2.5-0.5B)."""
TRIED_ROWS = (1, 7, 20)
TOLERANCE = 0.02
"""Of a weight's largest output, by which the kernel may differ from oneDNN's: both round to bfloat16."""


class FewRows:
    """One weight's products, read where oneDNN has it."""

    def __init__(self, address: int, packed: Tensor, bias: Tensor | None) -> None:
        """packed: [outputs, inputs], which has to be laid out as the kernel reads it;  bias: [outputs]"""
        from serve_app.engine.cpu import product_kernel as kernel

        self._address = address
        self._packed = packed
        self._bias = None if bias is None else bias.detach().float()
        self._tile = kernel.TILE
        self._vectors = kernel.VECTORS
        self._outputs, self._inputs = packed.shape
        self._num_blocks = -(-self._outputs // kernel.BLOCK)
        self._begin: Any = torch.ops.mkldnn.data_ptr(packed)
        self._call = team_call()

    @classmethod
    def find(cls, packed: Tensor, bias: Tensor | None) -> FewRows | None:
        """For a weight that oneDNN has laid out; None where no kernel reads it so, which is tried beside oneDNN."""
        address = _kernel() if packed.dtype == torch.bfloat16 else None
        if address is None or not _may_be_read(packed):
            return None
        found = cls(address, packed, bias)
        return found if found._is_right() else None

    def takes(self, x: Tensor) -> bool:
        """x: [..., inputs]"""
        return x.dim() == 2 and 0 < len(x) <= MAX_ROWS and x.stride(1) == 1 and x.dtype == torch.bfloat16

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs], which it `takes`. Returns [rows, outputs]."""
        num_rows, num_threads = len(x), torch.get_num_threads()
        output = torch.empty(num_rows, self._outputs, dtype=torch.bfloat16)
        passes = -(-num_rows // self._tile)
        lines = 1 << max(0, -(-self._vectors // passes) - 1).bit_length()
        parameters = (ctypes.c_int64 * 13)()  # the last one counts the blocks that were taken
        begin = ctypes.addressof(parameters)
        parameters[:12] = [
            begin + 12 * ctypes.sizeof(ctypes.c_int64), self._num_blocks, x.data_ptr(), x.stride(0), self._begin,
            output.data_ptr(), self._outputs, 0 if self._bias is None else self._bias.data_ptr(), num_rows,
            self._inputs // 2, num_threads, lines,
        ]  # fmt: skip
        self._call(self._address, begin, num_threads, 0)
        return output

    @torch.inference_mode()
    def _is_right(self) -> bool:
        draw = torch.Generator().manual_seed(0)
        bias = None if self._bias is None else self._bias.bfloat16()
        for rows in TRIED_ROWS:
            x = torch.randn(rows, self._inputs, generator=draw).bfloat16()
            theirs = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "").float()
            limit = TOLERANCE * float(theirs.abs().max())
            if not torch.allclose(self(x).float(), theirs, rtol=0, atol=limit):
                return False
        return True


def _may_be_read(packed: Tensor) -> bool:
    """Whether the memory has the size of whole blocks, and sizes are what the kernel divides by."""
    from serve_app.engine.cpu import product_kernel as kernel

    if not hasattr(torch.ops.mkldnn, "data_ptr") or not hasattr(torch.ops.mkldnn, "_nbytes"):
        return False
    outputs, inputs = packed.shape
    size = -(-outputs // kernel.BLOCK) * kernel.BLOCK * inputs * packed.element_size()
    num_bytes: Any = torch.ops.mkldnn._nbytes(packed)
    return num_bytes == size and outputs % kernel.WIDTH == 0 and inputs % (2 * kernel.UNROLLED) == 0


@functools.cache
def _kernel() -> int | None:
    """The kernel's address; None where this CPU, or this machine, has none.

    On CPUs with AMX oneDNN multiplies by that, and was not compared.
    """
    if libgomp() is None or not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return None
    try:
        from serve_app.engine.cpu import product_kernel as kernel

        code = compiling.compiled(kernel.emit())
        _made.append(code)
        return code.address_of(kernel.NAME)
    except (ImportError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("products of few rows are oneDNN's: no kernel could be made (%s)", error)
        return None


_made: list[object] = []
"""Code that is used, for as long as the process lives."""
