"""Norms, rotations and gates of a step's tokens, each in one pass where this machine has kernels for it."""

from __future__ import annotations

import functools
import logging
import subprocess

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.calling import KINDS, Kernel, float_bits
from serve_app.engine.cpu.sequence import Call
from serve_app.engine.decoder.openmp import libgomp

logger = logging.getLogger(__name__)

SHORT = 1 << 15
"""Numbers that one thread computes faster than it wakes another."""
TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 3e-3, torch.float32: 1e-5}
"""Of results that are about one, by which they may differ from torch's."""


class TokenKernels:
    """For tokens of one type of numbers, in rows of whole vectors."""

    def __init__(self, code: compiling.Code, width: int, dtype: torch.dtype) -> None:
        """width: float32 of a vector"""
        from serve_app.engine.cpu import token_kernels as names

        self._width = width
        self._dtype = dtype
        self._norm = Kernel(code, names.NORM)
        self._add_and_norm = Kernel(code, names.ADD_AND_NORM)
        self._turn = Kernel(code, names.TURN)
        self._gate = Kernel(code, names.GATE)
        self._divide = Kernel(code, names.DIVIDE)
        self._round = Kernel(code, names.ROUND)
        self._multiply = Kernel(code, names.MULTIPLY)
        self._keep = Kernel(code, names.KEEP)
        self._norm_heads = Kernel(code, names.NORM_HEADS)

    def takes(self, x: Tensor, size: int) -> bool:
        """Whether the numbers of tokens, of which `size` follow each other, can be computed so."""
        return x.dtype == self._dtype and x.stride(-1) == 1 and size % self._width == 0 and x.device.type == "cpu"

    def gives(self, size: int) -> bool:
        """Whether tokens of so many numbers can be made."""
        return size % self._width == 0

    def turns(self, heads: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether `turn` can."""
        half, follow_each_other = cos.shape[-1] // 2, heads.stride()[1:] == (heads.shape[2], 1)
        is_whole = cos.dtype == sin.dtype == self._dtype and cos.is_contiguous() and sin.is_contiguous()
        return self.takes(heads, half) and half > 0 and follow_each_other and is_whole

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / √(Σ x² + eps) · weight. x: [tokens, size], contiguous;  weight: [size] float32"""
        tokens, size = x.shape
        output = torch.empty_like(x)
        _run(self._norm, tokens, size, x.data_ptr(), output.data_ptr(), weight.data_ptr(), size, float_bits(eps))
        return output

    def add_and_norm(self, x: Tensor, change: Tensor, factor: float, weight: Tensor, eps: float) -> Tensor:
        """The norm of x + change · factor, which x becomes. x, change: [tokens, size], contiguous"""
        tokens, size = x.shape
        output = torch.empty_like(x)
        _run(
            self._add_and_norm, tokens, size, x.data_ptr(), output.data_ptr(), weight.data_ptr(), size, float_bits(eps),
            change.data_ptr(), float_bits(factor),
        )  # fmt: skip
        return output

    def turn(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate in place. heads: [tokens, heads, dim], those of a token one behind the other;  cos, sin: [tokens, 1,
        rotated], contiguous"""
        tokens, count, dim = heads.shape
        half = cos.shape[-1] // 2
        _run(self._turn, tokens, count * dim, heads.data_ptr(), heads.stride(0), count, dim, half, cos.data_ptr(),
                   sin.data_ptr())  # fmt: skip

    def norm_heads(self, heads: Tensor, num_queries: int, weights: tuple[Tensor, Tensor], eps: float) -> None:
        """`norm` of each head, in place. heads: [tokens, heads, dim], those of a token one behind the other, which are
        taken;  weights: of queries, and of the heads behind those, each [dim] float32"""
        tokens, count, dim = heads.shape
        query_weight, key_weight = weights
        _run(self._norm_heads, tokens, count * dim, heads.data_ptr(), heads.stride(0), num_queries, count, dim,
             float_bits(eps), query_weight.data_ptr(), key_weight.data_ptr())  # fmt: skip

    def gate(self, inputs: Tensor) -> Tensor:
        """silu of the first half of each token's numbers, times the second. inputs: [tokens, 2 · size], contiguous"""
        tokens, size = inputs.shape[0], inputs.shape[1] // 2
        output = inputs.new_empty(tokens, size)
        _run(self._gate, tokens, size, inputs.data_ptr(), output.data_ptr(), size)
        return output

    def call(self, name: str, **given: int) -> Call:
        """A call of one of these, by the name and the parameters that `token_kernels` has, but `num_tokens`."""
        from serve_app.engine.cpu import token_kernels as of

        kernels = {
            of.NORM: self._norm, of.ADD_AND_NORM: self._add_and_norm, of.TURN: self._turn, of.GATE: self._gate,
            of.ROUND: self._round, of.KEEP: self._keep, of.NORM_HEADS: self._norm_heads,
        }  # fmt: skip
        return Call(kernel=kernels[name], names=of.PARAMETERS[name], given=given)

    def divide(self, x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
        """x over a scale for each token, in float32, and the scales, [tokens, 1]: its largest number over `levels`,
        and no number where it has one that is none. x: [tokens, size], contiguous"""
        tokens, size = x.shape
        output, scales = torch.empty(tokens, size), torch.empty(tokens, 1)
        _run(
            self._divide, tokens, size, x.data_ptr(), output.data_ptr(), size, scales.data_ptr(), float_bits(levels),
        )  # fmt: skip
        return output, scales

    def round(self, x: Tensor, levels: int, stride: int) -> tuple[Tensor, Tensor]:
        """The same as nearest whole numbers and 128, in [tokens, stride] uint8; what is beyond `size` there is left."""
        tokens, size = x.shape
        output, scales = torch.empty(tokens, stride, dtype=torch.uint8), torch.empty(tokens, 1)
        _run(
            self._round, tokens, size, x.data_ptr(), output.data_ptr(), size, scales.data_ptr(), float_bits(levels),
            stride,
        )  # fmt: skip
        return output, scales

    def keep(self, new: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor], places: Tensor) -> None:
        """Write keys and values at their places. new: each [tokens, size], of one stride;  kept: each [places, size],
        contiguous;  places: [tokens] int64"""
        key, value = new
        _run(self._keep, len(places), key.shape[1], key.data_ptr(), value.data_ptr(), key.stride(0), key.shape[1],
             kept[0].data_ptr(), kept[1].data_ptr(), places.data_ptr())  # fmt: skip

    def multiply(self, sums: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """sums · scales + bias, in the type of these kernels. sums: [tokens, size] float32, contiguous;  scales:
        [tokens, 1] and bias: [size], float32"""
        tokens, size = sums.shape
        output = torch.empty(tokens, size, dtype=self._dtype)
        added = 0 if bias is None else bias.data_ptr()
        _run(self._multiply, tokens, size, sums.data_ptr(), output.data_ptr(), size, scales.data_ptr(), added)
        return output


def _run(kernel: Kernel, tokens: int, size: int, *parameters: int) -> None:
    """size: numbers of a token"""
    kernel(tokens, *parameters, is_short=tokens * size <= SHORT)


@functools.cache
def token_kernels(dtype: torch.dtype) -> TokenKernels | None:
    """The kernels for tokens of that type; None where this machine has none. They are tried beside torch first."""
    if dtype not in KINDS or libgomp() is None:
        return None
    try:
        kernels = _make(dtype)
    except (ImportError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("norms, rotations and gates are torch's: no kernels could be made (%s)", error)
        return None
    if not _are_right(kernels, dtype):
        logger.warning("norms, rotations and gates are torch's: the kernels in %s are wrong", dtype)
        return None
    return kernels


def _make(dtype: torch.dtype) -> TokenKernels:
    from serve_app.engine.cpu import token_kernels

    width = compiling.Machine.here().width
    return TokenKernels(compiling.compiled(token_kernels.emit, kind=KINDS[dtype], width=width), width, dtype)


@torch.inference_mode()
def _are_right(kernels: TokenKernels, dtype: torch.dtype) -> bool:
    draw = torch.Generator().manual_seed(0)
    x, change, inputs = (torch.randn(3, size, generator=draw).to(dtype) for size in (208, 208, 416))
    weight, sums = torch.rand(208, generator=draw) + 0.5, x + change * 0.5
    normed = kernels.add_and_norm(x, change, 0.5, weight * 208**0.5, 1e-6 * 208)
    expected = F.rms_norm(sums.float(), (208,), weight, 1e-6)
    gate, up = inputs.float().chunk(2, dim=-1)
    found = [(normed, expected), (kernels.norm(x, weight * 208**0.5, 1e-6 * 208), expected), (x, sums)]
    found.append((kernels.gate(inputs), F.silu(gate) * up))
    normed, of_heads = x.view(3, 13, 16).clone(), (weight[:16] * 4, weight[16:32] * 4)
    kernels.norm_heads(normed, 9, of_heads, 1e-6 * 16)
    expected = F.rms_norm(x.view(3, 13, 16).float(), (16,), None, 1e-6)
    found.append((normed, expected * torch.stack([weight[:16]] * 9 + [weight[16:32]] * 4)))
    angles = torch.randn(3, 1, 32, generator=draw)
    cos, sin = (torch.cat([each, each], dim=-1) for each in (angles.cos(), angles.sin()))
    heads = torch.randn(3, 4, 80, generator=draw).to(dtype)
    first, second, rest = heads.float().split([32, 32, 16], dim=-1)
    parts = (first * cos[..., :32] - second * sin[..., :32], second * cos[..., :32] + first * sin[..., :32], rest)
    kernels.turn(heads, cos.to(dtype), torch.cat([-sin[..., :32], sin[..., :32]], dim=-1).to(dtype))
    found.append((heads, torch.cat(parts, dim=-1)))
    divided, scales = kernels.divide(inputs, 127)
    found.append((kernels.multiply(divided, scales, torch.ones(416)), inputs.float() + 1))
    whole, scales = kernels.round(inputs, 127, 416)
    found.append((whole.float() - 128, divided.round()))
    found.append((divided.abs().amax(1), torch.full((3,), 127.0)))
    kept, places = torch.zeros(2, 7, 208, dtype=dtype), torch.tensor([5, 0, 6])
    kernels.keep((x, change), (kept[0], kept[1]), places)
    found += [(kept[0][places], x), (kept[1][places], change), (kept[0][1:5], torch.zeros(4, 208))]
    limit = TOLERANCES[dtype]
    return all(torch.allclose(ours.float(), theirs.float(), rtol=limit, atol=limit) for ours, theirs in found)
