"""Linears as this machine computes them fastest: weights laid out once, and what reads one input in one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.decoder.half import HalfWeight
from serve_app.engine.decoder.precision import cpu_is_fast
from serve_app.engine.decoder.stored import StoredLinear, Widening
from serve_app.engine.quantized.linear import QuantisedLinear, join_linears
from serve_app.kernels.interface import laid_out, may_read
from serve_app.kernels.openmp import alone

NUM_ROWS = 8
"""For how many rows oneDNN is asked to lay weights out. What it makes for one row takes 0.87 of the time at one row,
but 1.4 times at 8 and 1.2 at 32; for 8 and more it makes the same (AVX2, 9728 × 896 and 896 × 4864 in float32)."""

MIN_SIZE = 1 << 19
"""Entries of a weight that is laid out. A call of oneDNN's costs 25 µs before it begins: for 192 × 192 plain kernels
take a sixth of its time at one row, for 512 × 512 half of it, for 1024 × 512 the same, and 1.2 times that at 8 rows."""

MIN_OWN_SIZE = 1 << 13
"""The same where the kernel of our own reads what is laid out. It takes 0.35 to 0.7 of the plain kernels' time for 1 to
32 rows of 128 × 64 to 1408 × 256 in bfloat16, and 0.75 to 0.95 for 128 rows."""


class OneDnnWeight:
    """A linear's weight as oneDNN's kernels read it.

    torch's plain kernels lay a weight out anew in every call. In float32 on AVX2 with two threads they take 1.9 times
    as long at one row, 3.2 times at 8, 1.8 times at 32 and as long at 256.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [outputs, inputs], which `packs`;  bias: [outputs]"""
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), NUM_ROWS)
        self.num_bytes = weight.nbytes
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self.ours = laid_out(self.packed, bias)
        if self.ours is None and may_read(weight.shape, weight.dtype):
            self._lay_out_for_ours(weight)

    def _lay_out_for_ours(self, weight: Tensor) -> None:
        """For many threads oneDNN lays weights out in smaller blocks, from 16 on some of Qwen2.5-0.5B's."""
        with alone():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), NUM_ROWS)
        self.ours = laid_out(packed, self._bias)
        if self.ours is not None:
            self.packed = packed

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def dense(self) -> Tensor:
        """[outputs, inputs], a plain copy."""
        return self.packed.to_dense()

    def __call__(self, x: Tensor) -> Tensor:
        if self.ours is not None and self.ours.takes(x):
            return self.ours(x)
        y: Tensor = self._multiply(x, self.packed, self._bias, "none", [], "")
        return y


class PackedLinear(nn.Module):
    """A linear whose weight is kept as kernels of this machine read it, and in no other form.

    kept: oneDNN's form to begin with; another may take its place while the model computes
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [outputs, inputs], which `packs`;  bias: [outputs]"""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.kept: OneDnnWeight | HalfWeight = OneDnnWeight(weight, self.bias)

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs], a plain copy."""
        return self.kept.dense

    @property
    def frame(self) -> Tensor:
        """As large as the weight, of its type and where it is; without its numbers, and without memory."""
        return torch.empty(1, dtype=self.kept.dtype).expand(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.kept(x)


class PlainLinear(nn.Module):
    """A linear of torch's own kernels."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [outputs, inputs];  bias: [outputs]"""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def frame(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


WholeLinear: TypeAlias = PackedLinear | PlainLinear | QuantisedLinear


class JointLinear:
    """Linears that read the same input, as one product: `whole`, whose outputs are theirs one behind the other."""

    def __init__(self, linears: Sequence[Any], widening: Widening | None = None) -> None:
        """linears: of one kind and with the same inputs, and all with a bias or none
        widening: for those that are stored in fewer bits
        """
        self.whole = _whole(linears, widening)
        self._asked: Tensor | None = None
        self._answer: Tensor | None = None

    def part(self, x: Tensor, begin: int, end: int) -> Tensor:
        """Outputs begin … end-1. The product is kept from the first part to the last, while the input is the same."""
        answer = self._answer if self._asked is x else None
        if answer is None:
            answer = self.whole(x)
        is_last = end == self.whole.out_features
        self._asked, self._answer = (None, None) if is_last else (x, answer)
        return answer[..., begin:end]


class LinearPart(nn.Module):
    """Some outputs of a joint linear, in the place of the linear that they were, for modules that ask for one."""

    def __init__(self, joint: JointLinear, begin: int, end: int) -> None:
        super().__init__()
        self.joint = joint
        self.begin, self.end = begin, end
        self.in_features, self.out_features = joint.whole.in_features, end - begin
        # so that who counts what a model holds finds them, once
        self._parameters.update({f"whole_{name}": each for name, each in joint.whole.named_parameters()})

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs]"""
        return self.joint.whole.weight[self.begin : self.end]

    @property
    def frame(self) -> Tensor:
        """As large as the weight, of its type and where it is; without its numbers."""
        return self.joint.whole.frame[self.begin : self.end]

    @property
    def bias(self) -> Tensor | None:
        bias = self.joint.whole.bias
        return None if bias is None else bias[self.begin : self.end]

    def forward(self, x: Tensor) -> Tensor:
        return self.joint.part(x, self.begin, self.end)


def packs(weight: Tensor) -> bool:
    """Whether oneDNN lays out such weights on this machine."""
    return _packs_in(weight, weight.dtype)


def pays(weight: Tensor) -> bool:
    """Whether a weight is computed faster where it is laid out."""
    return pays_in(weight, weight.dtype)


def pays_in(weight: Tensor, dtype: torch.dtype) -> bool:
    """The same of a weight as it will be in these numbers."""
    min_size = MIN_OWN_SIZE if weight.dim() == 2 and may_read(weight.shape, dtype) else MIN_SIZE
    return weight.numel() >= min_size and _packs_in(weight, dtype)


def _packs_in(weight: Tensor, dtype: torch.dtype) -> bool:
    if weight.device.type != "cpu" or weight.layout != torch.strided or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or cpu_is_fast(dtype)


def make_linear(weight: Tensor, bias: Tensor | None) -> WholeLinear:
    """The fastest kind for such a weight."""
    return PackedLinear(weight, bias) if pays(weight) else PlainLinear(weight, bias)


def join(linears: Sequence[Any], widening: Widening | None = None) -> list[LinearPart]:
    """Lay linears out as one, and give the part that each of them was."""
    joint = JointLinear(linears, widening)
    parts, begin = [], 0
    for linear in linears:
        parts.append(LinearPart(joint, begin, begin + linear.out_features))
        begin += linear.out_features
    return parts


def can_join(linears: Sequence[Any]) -> bool:
    """Whether these are linears of one input and of one kind, plain or in few bits."""
    if not all(type(linear) in (nn.Linear, StoredLinear, QuantisedLinear) for linear in linears):
        return False
    kinds = {(type(linear), linear.in_features, linear.bias is None, _numbers(linear)) for linear in linears}
    return len(kinds) == 1


def _numbers(linear: Any) -> object:
    """What linears have to share to be one."""
    return linear.layout if isinstance(linear, QuantisedLinear) else linear.weight.dtype


def _whole(linears: Sequence[Any], widening: Widening | None) -> WholeLinear:
    if isinstance(linears[0], QuantisedLinear):
        return join_linears(linears)
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    if isinstance(linears[0], StoredLinear):
        assert widening is not None, "nothing says in which numbers they are computed"
        weight = widening.together(linears)
        return PackedLinear(weight, bias) if pays(weight) else PlainLinear(weight.clone(), bias)
    return make_linear(torch.cat([linear.weight.detach() for linear in linears]), bias)
