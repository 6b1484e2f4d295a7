"""A linear module whose weight is kept in few bits, in the place of one with a plain weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from serve_app.engine.quantized.int4_kernel import GroupsKernel
from serve_app.engine.quantized.int8_kernels import Int8Kernel, int8_kernel
from serve_app.engine.quantized.rounding import Bits, Int8Rows, Rounded, join, round_to_int4, round_to_int8


class QuantisedLinear(nn.Module):
    """Computes x @ weight.T + bias from a weight in few bits, which is kept in the form of its kernel alone.

    Gives the type of numbers that it is given.
    """

    def __init__(self, rounded: Rounded, bias: Tensor | None, *, dtype: torch.dtype) -> None:
        """dtype: of the model, in which `weight` is given"""
        super().__init__()
        self.out_features, self.in_features = rounded.numbers.shape
        self.bias: Tensor | None = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.layout = layout_of(rounded)
        self._dtype = dtype
        self._kernel = _kernel_for(rounded)
        self._widened: tuple[Tensor, Tensor] | None = None  # the bias, and in float32

    @property
    def weight(self) -> Tensor:
        """What it computes with, [outputs, inputs]: made anew whenever it is asked for."""
        return self._kernel.stored.weight.to(self._dtype)

    @property
    def frame(self) -> Tensor:
        """As large as the weight, of its type and where it is; without its numbers, and without memory."""
        return torch.empty(1, dtype=self._dtype).expand(self.out_features, self.in_features)

    @property
    def stored(self) -> Rounded:
        """The weight as it is stored, a copy."""
        return self._kernel.stored

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        bias = self._exact_bias()
        if x.dim() == 2:
            return self._kernel(x, bias)
        return self._kernel(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], self.out_features)

    def _exact_bias(self) -> Tensor | None:
        """In float32."""
        if self.bias is None:
            return None
        if self._widened is None or self._widened[0] is not self.bias:
            self._widened = self.bias, self.bias.detach().float()
        return self._widened[1]


def round_to(bits: Bits, weight: Tensor) -> Rounded:
    """weight: [out, in]"""
    return round_to_int8(weight) if bits == "int8" else round_to_int4(weight)


def layout_of(rounded: Rounded) -> tuple[str, int]:
    """What weights have to share to be joined: their kind, and into how many groups each output's inputs fall."""
    return type(rounded).__name__, 1 if isinstance(rounded, Int8Rows) else rounded.scales.shape[1]


def join_linears(linears: Sequence[QuantisedLinear]) -> QuantisedLinear:
    """Linears of the same inputs and bits as one, with the outputs of each behind those of the last.

    They all have a bias or none has. What each output computes is unchanged, to the last bit.
    """
    biases = [linear.bias for linear in linears if linear.bias is not None]
    rounded = join([linear.stored for linear in linears])
    return QuantisedLinear(rounded, torch.cat(biases) if biases else None, dtype=linears[0].frame.dtype)


def _kernel_for(rounded: Rounded) -> Int8Kernel | GroupsKernel:
    return int8_kernel()(rounded) if isinstance(rounded, Int8Rows) else GroupsKernel(rounded)
