"""Weights that are as good in 16 bits as in 32: kept in 16, multiplied with inputs in float32."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor

LOSS = 2.0**-24
"""How far a whole weight may be from what it is kept as, relative to its norm: what float32 itself rounds by.

Checkpoints in bfloat16 keep well within: float16 has three bits more, and lacks none but of numbers so small beside
the others (2^-17 absolute; 2^-31 of the largest where the weight is scaled) that they add nothing that float32 shows.
"""
LARGEST = 2.0**15
"""A scaled weight's largest number comes to lie below; float16 ends at nearly twice that."""
LEAST = 2.0**-14
"""A weight whose largest number is below is scaled: what is lost of it could not be told in float32."""
MOST_FACTOR = 2.0**60
LOOKED_AT = 16
"""One row of so many."""
TRIED_SIZES = ((1, 33, 7), (3, 512, 40), (8, 64, 130))


class HalfWeight:
    """A linear's weight in float16, as FBGEMM's kernels read it. Inputs, sums and outputs are float32.

    A step of few rows takes as long as its weights take to be read: half of it. In float32 on AVX2 with two threads,
    multiples of the speed of oneDNN with weights in float32, in two runs: 1.5–1.8 at one row, 1.1–2.0 at 8, and in one
    1.3–1.5 at 32, 1.1–1.2 at 512 (896 × 9728 and 4864 × 896). But laying out one number takes 10 to 25 ns, ten times
    as long as oneDNN's.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, factor: float) -> None:
        """weight: [outputs, inputs] float32;  bias: [outputs];  factor: by which the weight is kept, of `factor_for`"""
        self.num_bytes = weight.numel() * 2
        self._factor = factor
        scaled = weight.detach() if factor == 1.0 else weight.detach() * factor
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(scaled, bias)
        self._multiply = torch.ops.quantized.linear_dynamic_fp16.default

    @property
    def dtype(self) -> torch.dtype:
        """Of what it computes."""
        return torch.float32

    @property
    def dense(self) -> Tensor:
        """[outputs, inputs] float32, a plain copy."""
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return weight if self._factor == 1.0 else weight / self._factor

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., inputs] float32. Returns [..., outputs] float32."""
        y: Tensor = self._multiply(x if self._factor == 1.0 else x / self._factor, self._packed)
        return y


def factor_for(weight: Tensor) -> float | None:
    """The power of two times which a weight keeps its numbers in float16; None where it loses some, or no kernel is."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not has_kernel():
        return None
    largest = float(weight.abs().amax()) if weight.numel() else 0.0
    if not 0.0 < largest < math.inf:
        return None
    if LEAST < largest < LARGEST and _keeps(weight, 1.0):
        return 1.0
    factor = math.ldexp(LARGEST, -math.frexp(largest)[1])
    return factor if factor <= MOST_FACTOR and _keeps(weight, factor) else None


def _keeps(weight: Tensor, factor: float) -> bool:
    """Whether little enough is lost, as every sixteenth row or so shows."""
    sample = weight[:: max(1, min(LOOKED_AT, len(weight) // 8))] * factor
    lost = torch.linalg.vector_norm(sample.half().float() - sample)
    return float(lost) <= LOSS * float(torch.linalg.vector_norm(sample))


@functools.cache
def has_kernel() -> bool:
    """Whether this torch multiplies float32 by weights in float16, and rounds nothing else to them."""
    try:
        return all(_is_exact(*sizes) for sizes in TRIED_SIZES)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def _is_exact(num_rows: int, inputs: int, outputs: int) -> bool:
    weight = (torch.arange(outputs * inputs).view(outputs, inputs) % 251 - 125) / 128
    x = 1 + torch.arange(num_rows * inputs).view(num_rows, inputs) % 17 / 2**20  # float16 would have made these 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = HalfWeight(weight, None, 1.0)(x)
    expected = (x.double() @ weight.double().T).float()
    scale = float(weight.abs().sum(1).max())
    return torch.allclose(got, expected, rtol=0, atol=scale * 2**-22)
