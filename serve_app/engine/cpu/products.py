"""Products by kernels of our own where this machine has them: with weights that oneDNN has laid out in bfloat16, and
with weights in whole numbers of eight bits."""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.calling import KINDS, Kernel
from serve_app.engine.cpu.sequence import Call, Spare
from serve_app.engine.decoder.openmp import libgomp

logger = logging.getLogger(__name__)

MAX_ROWS = 1024
"""Beyond so many nothing was compared. With two cores and 20 GB/s this takes, of oneDNN's time, 0.67 for one row, 0.78
for 8, 0.7 for 16, 0.8 to 1 for 32, 0.95 for 60 and for 512 (the linears of Qwen2.5-0.5B)."""
SHORT = 1 << 19
"""Products of pairs, or of fours, of numbers that one thread computes in the time that it takes to wake another."""
TRIED_ROWS = (1, 7, 20)
MIDDLE = 128
"""What inputs are moved up by, as the instruction takes those without a sign."""
TOLERANCE = 0.02
"""Of a weight's largest output, by which the kernel may differ from oneDNN's: both round to bfloat16."""


class LaidOut:
    """One weight's products, read where oneDNN has it."""

    def __init__(self, kernel: Kernel, packed: Tensor, bias: Tensor | None) -> None:
        """packed: [outputs, inputs], which has to be laid out as the kernel reads it;  bias: [outputs]"""
        from serve_app.engine.cpu import product_kernel as of

        self._kernel = kernel
        self._packed = packed
        self._bias = None if bias is None else bias.detach().float()
        self.num_outputs, self._inputs = packed.shape
        self._num_blocks = -(-self.num_outputs // of.BLOCK)
        self._begin: Any = torch.ops.mkldnn.data_ptr(packed)

    @classmethod
    def find(cls, packed: Tensor, bias: Tensor | None) -> LaidOut | None:
        """For a weight that oneDNN has laid out; None where no kernel reads it so, which is tried beside oneDNN."""
        kernel = _kernel() if packed.dtype == torch.bfloat16 else None
        if kernel is None or not _may_be_read(packed):
            return None
        found = cls(kernel, packed, bias)
        return found if found._is_right() else None

    @staticmethod
    def may_read(shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for a weight of this form, [outputs, inputs], if oneDNN lays it out as it does."""
        return dtype == torch.bfloat16 and _has_sizes(*shape) and _kernel() is not None

    def takes(self, x: Tensor) -> bool:
        """x: [..., inputs]"""
        has_form = x.dim() == 2 and 0 < len(x) <= MAX_ROWS and x.dtype == torch.bfloat16
        return has_form and x.shape[1] == self._inputs and x.stride(1) == 1 and x.stride(0) % 2 == 0

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs], which it `takes`. Returns [rows, outputs]."""
        num_rows = len(x)
        output = torch.empty(num_rows, self.num_outputs, dtype=torch.bfloat16)
        _run(
            self._kernel, (
                self._num_blocks, x.data_ptr(), x.stride(0) // 2, self._begin, output.data_ptr(), self.num_outputs,
                _address(self._bias), num_rows, self._inputs // 2,
            ),
        )  # fmt: skip
        return output

    def calls(self, x: Tensor, output: Tensor, spare: Spare) -> list[Call] | None:
        """The product, but for `num_rows` and `num_parts`, of rows at a place that stays, with results at another.

        x: [rows, inputs];  output: [rows, outputs];  spare: of as many rows

        None where no kernels of ours do all of it.
        """
        call = _call(
            self._kernel, num_blocks=self._num_blocks, x=x.data_ptr(), x_stride=x.stride(0) // 2, weight=self._begin,
            output=output.data_ptr(), num_outputs=self.num_outputs, bias=_address(self._bias),
            num_groups=self._inputs // 2,
        )  # fmt: skip
        return [call]

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
    """Whether the memory has the size of whole blocks, and the weight sizes that the kernel divides."""
    from serve_app.engine.cpu import product_kernel as of

    if not hasattr(torch.ops.mkldnn, "data_ptr") or not hasattr(torch.ops.mkldnn, "_nbytes"):
        return False
    outputs, inputs = packed.shape
    size = -(-outputs // of.BLOCK) * of.BLOCK * inputs * packed.element_size()
    num_bytes: Any = torch.ops.mkldnn._nbytes(packed)
    return num_bytes == size and _has_sizes(outputs, inputs)


def _has_sizes(outputs: int, inputs: int) -> bool:
    from serve_app.engine.cpu import product_kernel as of

    return outputs % of.WIDTH == 0 and inputs % (2 * of.UNROLLED) == 0


class WholeRows:
    """A weight in whole numbers of eight bits, and its products with rows of inputs that are rounded to as many."""

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        """numbers: [outputs, inputs] int8;  scales: [outputs] float32. Raises RuntimeError where there is no kernel."""
        from serve_app.engine.cpu import product_kernel as of

        if whole_kernel(torch.float32) is None:
            raise RuntimeError("no kernel")
        self.outputs, self.inputs = numbers.shape
        unit = 4 * of.UNROLLED
        padded = F.pad(numbers, (0, -self.inputs % unit, 0, -self.outputs % of.BLOCK))
        groups = padded.shape[1] // 4
        self._packed = padded.view(-1, of.BLOCK, groups, 4).transpose(1, 2).contiguous()
        self._factors = F.pad(scales.float(), (0, len(padded) - self.outputs))
        self._offsets = (padded.sum(1, dtype=torch.int32) * MIDDLE).contiguous()
        self._stride = -(-self.outputs // of.WIDTH) * of.WIDTH
        self.num_inputs = padded.shape[1]

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """The numbers and scales that it was made of, copies."""
        whole = self._packed.transpose(1, 2).reshape(-1, self.num_inputs)
        return whole[: self.outputs, : self.inputs].contiguous(), self._factors[: self.outputs].clone()

    def call(self, x: Tensor, scales: Tensor, bias: Tensor | None, output: Tensor) -> Call | None:
        """The product as in `LaidOut.calls`; None where it is not written as a whole.

        x, scales, bias: as below, at places that stay
        """
        kernel = whole_kernel(output.dtype)
        has_form = self._stride == self.outputs and (bias is None or bias.is_contiguous())
        if kernel is None or not has_form:
            return None
        blocks, groups, *_ = self._packed.shape
        return _call(
            kernel, num_blocks=blocks, x=x.data_ptr(), x_stride=x.stride(0) // 4, weight=self._packed.data_ptr(),
            output=output.data_ptr(), num_outputs=self._stride, bias=_address(bias), num_groups=groups,
            scales=scales.data_ptr(), factors=self._factors.data_ptr(), offsets=self._offsets.data_ptr(),
        )  # fmt: skip

    def __call__(self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x: [rows, num_inputs] uint8, each 128 above what is meant;  scales: [rows, 1] and bias: [outputs], float32.
        Returns [rows, outputs]."""
        kernel = whole_kernel(dtype)
        assert kernel is not None, "it was there in float32"
        output = torch.empty(len(x), self._stride, dtype=dtype)
        has_form = bias is None or (self._stride == self.outputs and bias.is_contiguous())
        padded = bias if bias is None or has_form else F.pad(bias, (0, self._stride - self.outputs)).contiguous()
        blocks, groups, *_ = self._packed.shape
        _run(
            kernel, (
                blocks, x.data_ptr(), self.num_inputs // 4, self._packed.data_ptr(), output.data_ptr(), self._stride,
                _address(padded), len(x), groups,
            ), (scales.data_ptr(), self._factors.data_ptr(), self._offsets.data_ptr()),
        )  # fmt: skip
        return output if self._stride == self.outputs else output[:, : self.outputs].contiguous()


def _run(kernel: Kernel, parameters: Sequence[int], whole: Sequence[int] = (0, 0, 0)) -> None:
    """parameters: from the number of blocks to that of groups;  whole: those of whole numbers"""
    from serve_app.engine.cpu import product_kernel as of

    num_blocks, num_rows, num_groups = parameters[0], *parameters[-2:]
    is_short = num_blocks * of.BLOCK * num_groups * num_rows <= SHORT
    num_threads = 1 if is_short else torch.get_num_threads()
    kernel(
        *parameters, num_threads, *whole, _num_whole(num_blocks, num_threads), num_parts(num_rows), is_short=is_short
    )


def _call(kernel: Kernel, *, num_blocks: int, **given: int) -> Call:
    from serve_app.engine.cpu import product_kernel as of

    num_threads = torch.get_num_threads()
    num_whole = _num_whole(num_blocks, num_threads)
    given |= {"num_blocks": num_blocks, "num_threads": num_threads, "num_whole": num_whole}
    return Call(kernel=kernel, names=of.PARAMETERS, given=given)


def _address(numbers: Tensor | None) -> int:
    return 0 if numbers is None else numbers.data_ptr()


def _num_whole(num_blocks: int, num_threads: int) -> int:
    """Blocks that are not divided: what makes no round of them, and the last round, is, so that all threads end
    together."""
    return max(0, num_blocks // num_threads - 1) * num_threads


def num_parts(num_rows: int) -> int:
    """Into which a block is divided."""
    from serve_app.engine.cpu import product_kernel as of

    return -(-num_rows // of.ROWS)


@functools.cache
def _kernel() -> Kernel | None:
    """The kernel in bfloat16; None where this CPU, or this machine, has none."""
    return _made_for("bfloat16", is_whole=False) if torch.cpu._is_avx512_bf16_supported() else None


@functools.cache
def whole_kernel(dtype: torch.dtype) -> Kernel | None:
    """The kernel of whole numbers with results of that type; None where there is none."""
    has_instructions = bool(torch.cpu.get_capabilities().get("avx512_vnni"))
    return _made_for(KINDS[dtype], is_whole=True) if has_instructions and dtype in KINDS else None


def _made_for(output: Literal["bfloat16", "float16", "float32"], *, is_whole: bool) -> Kernel | None:
    """On CPUs with AMX oneDNN multiplies by that, and was not compared."""
    if libgomp() is None or torch.cpu._is_amx_tile_supported():
        return None
    try:
        from serve_app.engine.cpu import product_kernel as of

        return Kernel(compiling.compiled(of.emit, is_whole=is_whole, output=output), of.NAME)
    except (ImportError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        what = "whole numbers" if is_whole else "bfloat16"
        logger.warning("products of %s are torch's: no kernel could be made (%s)", what, error)
        return None
