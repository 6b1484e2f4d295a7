"""Linears whose weight stays in few bits, in place of plain ones.

torchao is not among the fixed packages. The contract is a per-row int8 product that is exact in any company.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.decoder.text_part import ModelNotSupported
from serve_app.kernels.interface import whole_rows
from serve_app.kernels.torch_private import multiply_int4, pack_int4, quantised

Bits: TypeAlias = Literal["int8", "int4"]
"""What `weights` of a model may be."""

LARGEST = 127
"""Of a number of eight bits; -128 is left out, so that a weight and its negative are rounded alike."""
MIDDLE = 8
STEPS = 15
GROUP = 32
"""Inputs that share a scale in four bits."""
CHUNK_ROWS = 8192
"""Outputs that are rounded at once: what that takes on the way is a few times their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Rows:
    """numbers · scales[:, None]

    numbers: [out, in] int8;  scales: [out] float32
    """

    numbers: Tensor
    scales: Tensor

    @property
    def weight(self) -> Tensor:
        """[out, in] float32"""
        return self.numbers.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Groups:
    """(numbers - 8) · scales + offsets, those of the group that an input is in.

    numbers: [out, in] uint8, 0 … 15;  scales, offsets: [out, groups] bfloat16
    """

    numbers: Tensor
    scales: Tensor
    offsets: Tensor

    @property
    def weight(self) -> Tensor:
        """[out, in] float32"""
        grouped: Tensor = self.numbers.unflatten(1, (self.scales.shape[1], -1)).float() - MIDDLE
        return (grouped * self.scales.float()[..., None] + self.offsets.float()[..., None]).flatten(1)


Rounded: TypeAlias = Int8Rows | Int4Groups
SomeRounded = TypeVar("SomeRounded", bound=Rounded)


def round_to(bits: Bits, weight: Tensor) -> Rounded:
    """Return the nearest numbers to a weight [out, in].

    int8: each output's largest number becomes 127. int4: the least and the largest of each group of 32 inputs, which
    divide the inputs, become 0 and 15.
    """
    rounded = [(_round_rows if bits == "int8" else _round_groups)(rows) for rows in weight.split(CHUNK_ROWS)]
    return join(rounded)


def join(parts: Sequence[SomeRounded]) -> SomeRounded:
    """Join weights of the same inputs, their outputs one behind the other; int4 needs equal groups."""
    if len(parts) == 1:
        return parts[0]
    kind = type(parts[0])
    return kind(**{each.name: torch.cat([getattr(part, each.name) for part in parts]) for each in fields(kind)})


def _round_rows(weight: Tensor) -> Int8Rows:
    weight = weight.float()
    scales = weight.abs().amax(1).div_(LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
    numbers = (weight / scales[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return Int8Rows(numbers=numbers.to(torch.int8), scales=scales)


def _round_groups(weight: Tensor) -> Int4Groups:
    grouped = weight.float().unflatten(1, (-1, GROUP))
    least, largest = grouped.aminmax(dim=2)
    scales = ((largest - least) / STEPS).clamp_min_(torch.finfo(torch.bfloat16).tiny).bfloat16()
    offsets = (least + MIDDLE * scales.float()).bfloat16()  # as kernels have them; numbers are the nearest to these
    numbers = (grouped - offsets.float()[..., None]).div_(scales.float()[..., None]).round_().add_(MIDDLE)
    return Int4Groups(numbers=numbers.clamp_(0, STEPS).to(torch.uint8).flatten(1), scales=scales, offsets=offsets)


class QuantisedLinear(nn.Module):
    """Computes x @ weight.T + bias from a weight in few bits, which is kept in the form of its kernel alone.

    Gives the type of numbers that it is given.

    layout: what such linears have to share to be joined: their kind, and the groups of each output's inputs
    """

    def __init__(self, rounded: Rounded, bias: Tensor | None, *, dtype: torch.dtype) -> None:
        """dtype: of the model, in which `weight` is given"""
        super().__init__()
        self.out_features, self.in_features = rounded.numbers.shape
        self.bias: Tensor | None = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.layout = type(rounded), 1 if isinstance(rounded, Int8Rows) else rounded.scales.shape[1]
        self._dtype = dtype
        self._kernel: Int8Kernel | GroupsKernel = (
            int8_kernel()(rounded) if isinstance(rounded, Int8Rows) else GroupsKernel(rounded)
        )
        self._widened: tuple[Tensor, Tensor] | None = None  # the bias, and in float32

    @property
    def weight(self) -> Tensor:
        """Return the weight that it computes with, [outputs, inputs], a new tensor at every call."""
        return self._kernel.stored.weight.to(self._dtype)

    @property
    def frame(self) -> Tensor:
        """Return a tensor of the weight's shape, dtype and device that takes no memory."""
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


def join_linears(linears: Sequence[QuantisedLinear]) -> QuantisedLinear:
    """Join linears of the same inputs and bits, with the outputs of each behind those of the last.

    They all have a bias or none has. What each output computes is unchanged, to the last bit.
    """
    biases = [linear.bias for linear in linears if linear.bias is not None]
    rounded = join([linear.stored for linear in linears])
    return QuantisedLinear(rounded, torch.cat(biases) if biases else None, dtype=linears[0].frame.dtype)


GROUPS = (32, 64, 128, 256)
"""Sizes that the kernel takes."""
BULK_ROWS = 64
"""From so many rows on the weight becomes plain numbers for one product: the kernel takes a time per row."""
PADDED = 64
"""Outputs are filled up to a multiple, so that all lie in whole blocks."""
BULK_OUTPUTS = 2048
"""Of a weight that are plain at once."""


class GroupsKernel:
    """torch's `_weight_int4pack_mm_for_cpu`; a row's result is the same in any company of fewer than 64 rows."""

    def __init__(self, groups: Int4Groups) -> None:
        self._outputs, self._inputs = groups.numbers.shape
        self._group = self._inputs // groups.scales.shape[1]
        self._block = block_of()
        more = -self._outputs % PADDED
        numbers = torch.nn.functional.pad(groups.numbers, (0, 0, 0, more), value=MIDDLE)
        table = torch.stack([groups.scales, groups.offsets], dim=2)
        self._table = torch.nn.functional.pad(table, (0, 0, 0, 0, 0, more)).transpose(0, 1).contiguous()
        self._packed = pack_int4(numbers)

    @property
    def stored(self) -> Int4Groups:
        """Return the weight that it was made of, unpacked."""
        numbers = _unpack(self._packed, self._block).T[: self._outputs].contiguous()
        scales, offsets = self._table.transpose(0, 1)[: self._outputs].unbind(2)
        return Int4Groups(numbers=numbers, scales=scales.contiguous(), offsets=offsets.contiguous())

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [rows, in];  bias: [out] float32. Returns [rows, out], of the inputs' type."""
        if len(x) < BULK_ROWS:
            y = multiply_int4(x.bfloat16(), self._packed, self._group, self._table)
        else:  # the same with plain numbers; sums have another order
            rows = x.bfloat16().float()
            y = torch.cat([(rows @ plain).bfloat16() for plain in self._plain()], dim=1)
        y = y[:, : self._outputs]
        return (y if bias is None else y.float().add_(bias)).to(x.dtype)

    def _plain(self) -> Iterator[Tensor]:
        """The weight in pieces, [in, some outputs] float32."""
        for begin in range(0, len(self._packed), BULK_OUTPUTS):
            end = begin + BULK_OUTPUTS
            numbers = _unpack(self._packed[begin:end], self._block)
            scales, offsets = self._table[:, begin:end].float().unbind(2)
            grouped = numbers.float().sub_(MIDDLE).unflatten(0, (-1, self._group))
            plain: Tensor = grouped.mul_(scales[:, None]).add_(offsets[:, None])
            yield plain.flatten(0, 1)


def check_fits(name: str, outputs: int, inputs: int) -> None:
    """Raise ModelNotSupported where the kernel takes no weight of this shape."""
    if inputs % GROUP:
        raise ModelNotSupported(
            f"weights: int4 takes groups of {GROUP} inputs, which do not divide the {inputs} of {name}"
            f" [{outputs}, {inputs}]; use int8, or leave weights out"
        )


@functools.cache
def block_of() -> int:
    """Find out how many outputs this CPU's kernel packs together. Raises ModelNotSupported."""
    numbers = (torch.arange(PADDED)[:, None] * 7 + torch.arange(GROUP) * 5).remainder(16).to(torch.uint8)
    try:
        packed = pack_int4(numbers)
    except (RuntimeError, AttributeError) as error:
        raise ModelNotSupported(f"weights: int4 has no kernel on this CPU: {error}") from error
    for block in (32, 64):
        if torch.equal(_unpack(packed, block).T, numbers):
            return block
    raise ModelNotSupported("weights: int4 is packed on this CPU in an order that is not known; use int8")


def _unpack(packed: Tensor, block: int) -> Tensor:
    """Return the packed numbers, [in, out] uint8. A byte's upper half belongs to the output half a block later."""
    lanes = packed.view(torch.uint8).view(-1, packed.shape[1] * 2, block // 2)  # [blocks, in, half of a block]
    return torch.cat([lanes & 15, lanes >> 4], dim=2).transpose(0, 1).flatten(1)


EIGHT_BITS = 127
SEVEN_BITS = 63
TRIED_SIZES = ((3, 512, 40), (1, 33, 7))


class FbgemmRows:
    """Multiplies by FBGEMM, on every CPU with AVX2.

    Its instructions before VNNI add two products in 16 bits, which seven bits of an input times eight of a weight
    never leave, and eight do: so inputs have seven bits there.
    """

    def __init__(self, rows: Int8Rows, levels: int) -> None:
        """levels: what the largest input of a row becomes"""
        self.levels = levels
        self._packed: Any = torch.ops.quantized.linear_prepack(quantised(rows.numbers, rows.scales), None)
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    @property
    def stored(self) -> Int8Rows:
        """Return the weight that it was made of, unpacked."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight = torch.ops.quantized.linear_unpack(self._packed)[0]
            return Int8Rows(numbers=weight.int_repr(), scales=weight.q_per_channel_scales().float())

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [rows, in];  bias: [out] float32. Returns [rows, out], of the inputs' type."""
        divided, scales = divided_by_scales(x, self.levels)
        return times_scales(self._multiply(divided, 1.0, self.levels + 1, self._packed), scales, bias, x.dtype)


class VnniRows:
    """Multiplies by our own kernel, on CPUs with AVX512-VNNI. It rounds inputs and scales sums by itself."""

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
    """Multiplies by oneDNN, which has kernels for AMX."""

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
    """Return the rows in float32, scaled so that the largest number of each is `levels`, and the scales, [rows, 1].

    Each row is scaled by its own largest number, so its result is the same in any company. (torch's dynamic kernels
    scale a whole batch by its largest.) If a row contains NaN, its scale is NaN.
    """
    exact = x.float()
    scales = exact.abs().amax(1, keepdim=True).div_(levels).clamp_min_(torch.finfo(torch.float32).tiny)
    return exact / scales, scales


def times_scales(y: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y: [rows, out] float32;  dtype: of the result"""
    return (y.mul_(scales) if bias is None else torch.addcmul(bias, y, scales)).to(dtype)


@functools.cache
def int8_kernel() -> MakeInt8Kernel:
    """Return the fastest kernel, as measured, whose sums are exact on this CPU.

    On AVX2 FBGEMM is faster than oneDNN. With AVX512-VNNI oneDNN computes them by its slow reference; with AMX it comes
    first. Whether sums are exact is seen by the largest numbers that can be.
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
    if torch.cpu.get_capabilities().get("amx_tile"):
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
