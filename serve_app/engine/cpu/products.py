"""Products by kernels of our own where this machine has them: with weights that oneDNN has laid out in bfloat16, and
with weights in whole numbers of eight bits."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.calling import KINDS, team_call
from serve_app.engine.openmp import libgomp

logger = logging.getLogger(__name__)

MAX_ROWS = 1024
"""Beyond so many nothing was compared. With two cores and 20 GB/s this takes, of oneDNN's time, 0.67 for one row, 0.78
for 8, 0.7 for 16, 0.8 to 1 for 32, 0.95 for 60 and for 512 (the linears of Qwen2.5-0.5B)."""
TRIED_ROWS = (1, 7, 20)
MIDDLE = 128
"""What inputs are moved up by, as the instruction takes those without a sign."""
TOLERANCE = 0.02
"""Of a weight's largest output, by which the kernel may differ from oneDNN's: both round to bfloat16."""


class LaidOut:
    """One weight's products, read where oneDNN has it."""

    def __init__(self, address: int, packed: Tensor, bias: Tensor | None) -> None:
        """packed: [outputs, inputs], which has to be laid out as the kernel reads it;  bias: [outputs]"""
        from serve_app.engine.cpu import product_kernel as kernel

        self._address = address
        self._packed = packed
        self._bias = None if bias is None else bias.detach().float()
        self._outputs, self._inputs = packed.shape
        self._num_blocks = -(-self._outputs // kernel.BLOCK)
        self._begin: Any = torch.ops.mkldnn.data_ptr(packed)

    @classmethod
    def find(cls, packed: Tensor, bias: Tensor | None) -> LaidOut | None:
        """For a weight that oneDNN has laid out; None where no kernel reads it so, which is tried beside oneDNN."""
        address = _kernel() if packed.dtype == torch.bfloat16 else None
        if address is None or not _may_be_read(packed):
            return None
        found = cls(address, packed, bias)
        return found if found._is_right() else None

    def takes(self, x: Tensor) -> bool:
        """x: [..., inputs]"""
        has_form = x.dim() == 2 and 0 < len(x) <= MAX_ROWS and x.dtype == torch.bfloat16
        return has_form and x.shape[1] == self._inputs and x.stride(1) == 1 and x.stride(0) % 2 == 0

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs], which it `takes`. Returns [rows, outputs]."""
        num_rows = len(x)
        output = torch.empty(num_rows, self._outputs, dtype=torch.bfloat16)
        _call(
            self._address, (
                self._num_blocks, x.data_ptr(), x.stride(0) // 2, self._begin, output.data_ptr(), self._outputs,
                0 if self._bias is None else self._bias.data_ptr(), num_rows, self._inputs // 2,
            ),
        )  # fmt: skip
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


class WholeRows:
    """A weight in whole numbers of eight bits, and its products with rows of inputs that are rounded to as many."""

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        """numbers: [outputs, inputs] int8;  scales: [outputs] float32. Raises RuntimeError where there is no kernel."""
        from serve_app.engine.cpu import product_kernel as kernel

        if whole_kernel(torch.float32) is None:
            raise RuntimeError("no kernel")
        self.outputs, self.inputs = numbers.shape
        unit = 4 * kernel.UNROLLED
        padded = F.pad(numbers, (0, -self.inputs % unit, 0, -self.outputs % kernel.BLOCK))
        groups = padded.shape[1] // 4
        self._packed = padded.view(-1, kernel.BLOCK, groups, 4).transpose(1, 2).contiguous()
        self._factors = F.pad(scales.float(), (0, len(padded) - self.outputs))
        self._offsets = (padded.sum(1, dtype=torch.int32) * MIDDLE).contiguous()
        self._stride = -(-self.outputs // kernel.WIDTH) * kernel.WIDTH
        self.num_inputs = padded.shape[1]

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """The numbers and scales that it was made of, copies."""
        whole = self._packed.transpose(1, 2).reshape(-1, self.num_inputs)
        return whole[: self.outputs, : self.inputs].contiguous(), self._factors[: self.outputs].clone()

    def __call__(self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x: [rows, num_inputs] uint8, each 128 above what is meant;  scales: [rows, 1] and bias: [outputs], float32.
        Returns [rows, outputs]."""
        address = whole_kernel(dtype)
        assert address is not None, "it was there in float32"
        output = torch.empty(len(x), self._stride, dtype=dtype)
        padded = bias if bias is None else F.pad(bias, (0, self._stride - self.outputs)).contiguous()
        blocks, groups, *_ = self._packed.shape
        _call(
            address, (
                blocks, x.data_ptr(), self.num_inputs // 4, self._packed.data_ptr(), output.data_ptr(), self._stride,
                0 if padded is None else padded.data_ptr(), len(x), groups,
            ), (scales.data_ptr(), self._factors.data_ptr(), self._offsets.data_ptr()),
        )  # fmt: skip
        return output if self._stride == self.outputs else output[:, : self.outputs].contiguous()


def _call(address: int, parameters: Sequence[int], whole: Sequence[int] = (0, 0, 0)) -> None:
    """parameters: from the number of blocks to that of groups;  whole: those of whole numbers"""
    from serve_app.engine.cpu import product_kernel as kernel

    num_threads, passes = torch.get_num_threads(), -(-min(parameters[-2], kernel.ROWS) // kernel.TILE)
    lines = 1 << max(0, -(-kernel.VECTORS // passes) - 1).bit_length()
    given = (ctypes.c_int64 * (len(kernel.PARAMETERS) + 1))()  # the last one counts the blocks that were taken
    begin = ctypes.addressof(given)
    counter = begin + len(kernel.PARAMETERS) * ctypes.sizeof(ctypes.c_int64)
    given[: len(kernel.PARAMETERS)] = [counter, *parameters, num_threads, lines, *whole]
    team_call()(address, begin, num_threads, 0)


@functools.cache
def _kernel() -> int | None:
    """The address of the kernel in bfloat16; None where this CPU, or this machine, has none."""
    return _made_for("bfloat16", is_whole=False) if torch.cpu._is_avx512_bf16_supported() else None


@functools.cache
def whole_kernel(dtype: torch.dtype) -> int | None:
    """The address of the kernel of whole numbers with results of that type; None where there is none."""
    has_instructions = bool(torch.cpu.get_capabilities().get("avx512_vnni"))
    return _made_for(KINDS[dtype], is_whole=True) if has_instructions and dtype in KINDS else None


def _made_for(output: Literal["bfloat16", "float16", "float32"], *, is_whole: bool) -> int | None:
    """On CPUs with AMX oneDNN multiplies by that, and was not compared."""
    if libgomp() is None or torch.cpu._is_amx_tile_supported():
        return None
    try:
        from serve_app.engine.cpu import product_kernel as kernel

        code = compiling.compiled(kernel.emit(kernel.Numbers(is_whole=is_whole, output=output)))
        _made.append(code)
        return code.address_of(kernel.NAME)
    except (ImportError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        what = "whole numbers" if is_whole else "bfloat16"
        logger.warning("products of %s are torch's: no kernel could be made (%s)", what, error)
        return None


_made: list[object] = []
"""Code that is used, for as long as the process lives."""
