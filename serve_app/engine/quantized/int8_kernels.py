"""Products with weights of eight bits: each row of inputs is rounded by its own largest value, sums are of integers.

So a row's result is the same to its last bit, whatever rows are computed beside it. (torch's own dynamic kernels round
a whole batch by its largest value, and each row's result would depend on all.)
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engine.decoder.errors import ModelNotSupported
from serve_app.engine.quantized.rounding import Int8Rows
from serve_app.kernels.interface import whole_rows

EIGHT_BITS = 127
SEVEN_BITS = 63
TRIED_SIZES = ((3, 512, 40), (1, 33, 7))


class FbgemmRows:
    """By FBGEMM, on every CPU with AVX2.

    Its instructions before VNNI add two products in 16 bits, which seven bits of an input times eight of a weight
    never leave, and eight do: so inputs have seven bits there.
    """

    def __init__(self, rows: Int8Rows, levels: int) -> None:
        """levels: what the largest input of a row becomes"""
        self.levels = levels
        self._packed: Any = torch.ops.quantized.linear_prepack(_as_quantised(rows), None)
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    @property
    def stored(self) -> Int8Rows:
        """What it was made of, unpacked."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight = torch.ops.quantized.linear_unpack(self._packed)[0]
            return Int8Rows(numbers=weight.int_repr(), scales=weight.q_per_channel_scales().float())

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [rows, in];  bias: [out] float32. Returns [rows, out], of the inputs' type."""
        divided, scales = divided_by_scales(x, self.levels)
        return times_scales(self._multiply(divided, 1.0, self.levels + 1, self._packed), scales, bias, x.dtype)


class VnniRows:
    """By a kernel of our own, on CPUs with AVX512-VNNI: inputs are rounded, and sums scaled, as it reads and writes."""

    def __init__(self, rows: Int8Rows) -> None:
        """Raises RuntimeError where this machine has no such kernel."""
        self.levels = EIGHT_BITS
        found = whole_rows(rows.numbers, rows.scales)
        if found is None:
            raise RuntimeError("no kernel")
        self._weight = found

    @property
    def stored(self) -> Int8Rows:
        numbers, scales = self._weight.stored
        return Int8Rows(numbers=numbers, scales=scales)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [rows, in];  bias: [out] float32. Returns [rows, out], of the inputs' type."""
        divided, scales = divided_by_scales(x, self.levels)
        moved = divided.nan_to_num_(0.0).round_().add_(self._weight.middle)  # a row that has no number has no scale
        whole = F.pad(moved.to(torch.uint8), (0, self._weight.num_inputs - x.shape[1]))
        return self._weight(whole, scales, bias, x.dtype)


class OneDnnRows:
    """By oneDNN, which has kernels for AMX."""

    def __init__(self, rows: Int8Rows, levels: int) -> None:
        self.levels = levels
        self._scales = rows.scales
        self._zeros = torch.zeros(len(rows.scales), dtype=torch.int32)
        self._packed = torch.ops.onednn.qlinear_prepack(rows.numbers, None)
        self._multiply = torch.ops.onednn.qlinear_pointwise.default

    @property
    def stored(self) -> Int8Rows:
        return Int8Rows(numbers=self._packed.to_dense().T.contiguous(), scales=self._scales)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [rows, in];  bias: [out] float32. Returns [rows, out], of the inputs' type."""
        divided, scales = divided_by_scales(x, self.levels)
        y = self._multiply(
            divided.round_().to(torch.int8), 1.0, 0, self._packed, self._scales, self._zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return times_scales(y, scales, bias, x.dtype)


Int8Kernel = VnniRows | FbgemmRows | OneDnnRows
MakeInt8Kernel = Callable[[Int8Rows], Int8Kernel]


def divided_by_scales(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Rows, in float32, so that the largest number of each is `levels`; and what a step of each is worth, [rows, 1], no
    number where a row has one that is none."""
    exact = x.float()
    scales = exact.abs().amax(1, keepdim=True).div_(levels).clamp_min_(torch.finfo(torch.float32).tiny)
    return exact / scales, scales


def times_scales(y: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y: [rows, out] float32;  dtype: of the result"""
    return (y.mul_(scales) if bias is None else torch.addcmul(bias, y, scales)).to(dtype)


@functools.cache
def int8_kernel() -> MakeInt8Kernel:
    """The first kernel, in the order of what was measured, whose sums are exact on this CPU.

    On AVX2 FBGEMM took 0.11 to 0.2 of oneDNN's time. With AVX512-VNNI oneDNN computes them by its reference, and took
    6 to 300 times as long; with AMX it comes first. Whether sums are exact is seen by the largest numbers that can be.
    Raises ModelNotSupported where no kernel is.
    """
    for make in _candidates():
        try:
            if all(_is_exact(make, *sizes) for sizes in TRIED_SIZES):
                return make
        except (RuntimeError, AttributeError, NotImplementedError):
            continue  # a kernel that this build of torch has not
    raise ModelNotSupported("weights: int8 has no kernel on this CPU; leave weights out")


def _candidates() -> Iterator[MakeInt8Kernel]:
    onednn = functools.partial(OneDnnRows, levels=EIGHT_BITS)
    if torch.cpu._is_amx_tile_supported():
        yield onednn
    yield VnniRows
    yield functools.partial(FbgemmRows, levels=EIGHT_BITS)
    yield functools.partial(FbgemmRows, levels=SEVEN_BITS)
    yield onednn


def _is_exact(make: MakeInt8Kernel, num_rows: int, inputs: int, outputs: int) -> bool:
    signs = torch.arange(outputs)[:, None] % 3 > torch.arange(inputs)[None] % 2  # all alike in some, mixed in others
    numbers = torch.where(signs, EIGHT_BITS, -EIGHT_BITS).to(torch.int8)
    rows = Int8Rows(numbers=numbers, scales=torch.ones(outputs))
    for x in (torch.ones(num_rows, inputs), -torch.ones(num_rows, inputs)):
        expected = (x.double() @ numbers.double().T).float()
        if not torch.allclose(make(rows)(x, None), expected, rtol=1e-5, atol=1e-2):
            return False
    return True


def _as_quantised(rows: Int8Rows) -> Tensor:
    zeros = torch.zeros(len(rows.scales), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop its quantised tensors; this is the only way to pack one
        return torch._make_per_channel_quantized_tensor(rows.numbers, rows.scales.double(), zeros, 0)
