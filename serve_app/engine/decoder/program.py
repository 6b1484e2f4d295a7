"""All layers of a step that decodes in one call: what the loop would ask of kernels one after the other, laid out once.

The interpreter takes a tenth of such a step between kernels, and each of them wakes the other threads anew. Steps with
prompts, adapters or guesses, and layers with anything that is not a kernel of ours, are the loop's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from serve_app.engine.cpu.calling import Kernel, float_bits
from serve_app.engine.cpu.products import LaidOut, num_parts
from serve_app.engine.cpu.rows_plan import Decoding, Lanes, RowsPlan
from serve_app.engine.cpu.sequence import Call, CallSequence, Spare, carrier
from serve_app.engine.cpu.tokens import TokenKernels, token_kernels
from serve_app.engine.decoder.layer import Heads, Layer, Product, Rotation
from serve_app.engine.decoder.norm import Change, RootMeanSquare
from serve_app.engine.kv.plan import Scoring
from serve_app.engine.quantized.int8_kernels import RoundedRows
from serve_app.engine.step import Step

logger = logging.getLogger(__name__)

MOST_ROWS = 64
"""Tokens of a step, beyond which what the interpreter takes is not felt."""
Multiplier: TypeAlias = LaidOut | RoundedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a layer is, where all of it is kernels'.

    products: queries, keys and values; behind attention; both halves of the MLP, and behind it
    norms:    before attention, and before the MLP
    """

    products: tuple[Multiplier, Multiplier, Multiplier, Multiplier]
    norms: tuple[RootMeanSquare, RootMeanSquare]
    residual: float

    @property
    def form(self) -> tuple[object, ...]:
        return tuple((type(each), each.num_outputs) for each in self.products)

    @classmethod
    def find(cls, layer: Layer) -> Parts | None:
        attention, mlp = layer.attention, layer.mlp
        others = attention.clip, attention.query_norm, attention.scoring.sinks, layer.after_attention, layer.after_mlp
        if any(each is not None for each in others) or attention.rope is None or not mlp.is_silu:
            return None
        norms = layer.before_attention, layer.before_mlp
        products = [_ours(each) for each in (attention.inputs, attention.output, mlp.inputs, mlp.output)]
        if not isinstance(norms[0], RootMeanSquare) or not isinstance(norms[1], RootMeanSquare) or None in products:
            return None
        first, second, third, fourth = (each for each in products if each is not None)
        return cls(products=(first, second, third, fourth), norms=(norms[0], norms[1]), residual=layer.residual)


def _ours(product: object) -> Multiplier | None:
    return product.ours if isinstance(product, Product) else None


class Buffers:
    """What lies between the calls, the same in every layer. Each [MOST_ROWS, …] bfloat16."""

    def __init__(self, heads: Heads, parts: Parts) -> None:
        projected, hidden, spread, _ = (product.num_outputs for product in parts.products)
        self.stream, self.normed, self.change = (_empty(hidden) for _ in range(3))
        self.projected, self.attended = _empty(projected), _empty(heads.num_queries * heads.dim)
        self.spread, self.gated = _empty(spread), _empty(spread // 2)
        self.spare = Spare(MOST_ROWS)
        self.of_products = (
            (self.normed, self.projected), (self.attended, self.change), (self.normed, self.spread),
            (self.gated, self.change),
        )  # fmt: skip
        """What each product reads, and what it writes."""

    def heads(self, of: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of what is projected, each [MOST_ROWS, heads, dim]."""
        split = self.projected.view(MOST_ROWS, -1, of.dim)
        query, key, value = split.split([of.num_queries, of.num_keys, of.num_keys], dim=1)
        return query, key, value


def _empty(size: int) -> Tensor:
    return torch.empty(MOST_ROWS, size, dtype=torch.bfloat16)


class Made:
    """The calls of all layers, which are of the same kernels in each."""

    def __init__(self, carrier: Kernel, layers: Sequence[Sequence[Call]]) -> None:
        self.sequence = CallSequence(carrier, [call for layer in layers for call in layer])
        self._names = [call.names for call in layers[-1]]

    def put(self, known_by: str, **parameters: int | Tensor) -> None:
        """Into those calls of each layer that have a parameter of that name; a number for all, or one for each layer"""
        for at, names in enumerate(self._names):
            if known_by in names:
                self.sequence.put(at, len(self._names), **parameters)


class Program:
    """The layers of one decoder.

    parts: of each layer
    """

    def __init__(self, carrier: Kernel, tokens: TokenKernels, layers: Sequence[Layer], parts: Sequence[Parts]) -> None:
        self._carrier = carrier
        self._tokens = tokens
        self._parts = parts
        attention = layers[0].attention
        self._heads: Heads = attention.heads
        self._scoring: Scoring = attention.scoring
        self.rope = str(attention.rope)
        self._buffers = Buffers(attention.heads, parts[0])
        self._made: Made | None = None
        self._wanted: tuple[Lanes, int, int] | None = None
        self._num_rows = 0

    @classmethod
    def find(cls, layers: Sequence[Layer]) -> Program | None:
        """For layers that differ in nothing but their weights; None where a call in between would be another's."""
        found = [Parts.find(layer) for layer in layers]
        parts = [each for each in found if each is not None]
        forms = {(_form(layer), each.form) for layer, each in zip(layers, parts, strict=False)}
        if len(parts) < len(layers) or len(forms) != 1:
            return None
        tokens, runs = token_kernels(torch.bfloat16), carrier()
        if tokens is None or runs is None:
            return None
        sizes = [each.num_outputs for each in parts[0].products]
        if not all(tokens.gives(size) for size in (*sizes, sizes[2] // 2)):
            return None
        program = cls(runs, tokens, layers, parts)
        return program if None not in [calls for each in parts for calls in program._products(each)] else None

    def _products(self, parts: Parts) -> list[list[Call] | None]:
        """The calls of each."""
        has, places = self._buffers, self._buffers.of_products
        return [each.calls(x, y, has.spare) for each, (x, y) in zip(parts.products, places, strict=True)]

    def decoding(self, step: Step, x: Tensor, rotation: Rotation) -> Decoding | None:
        """How the step's queries are attended to, if it is one for this; None for the loop's. x: [tokens, hidden]"""
        plan, count = step.attention, len(x)
        if not isinstance(plan, RowsPlan) or count > MOST_ROWS or x.dtype != torch.bfloat16 or any(step.mixes):
            return None
        if step.embeddings is not None or step.logit_rows.tolist() != list(range(count)):
            return None
        query, key, _ = self._buffers.heads(self._heads)
        turned = self._buffers.projected[:count].view(count, -1, self._heads.dim)
        turned = turned[:, : query.shape[1] + key.shape[1]]
        if not self._tokens.turns(turned, rotation.cos, rotation.sin):
            return None
        return plan.decoding(query, self._scoring)

    def run(self, x: Tensor, rotation: Rotation, decoding: Decoding) -> Tensor:
        """The stream behind the last layer, [tokens, hidden], until the next run. x: the one before the first layer,
        which stays as it is"""
        made, count = self._made_for(decoding, rotation.cos.shape[-1]), len(x)
        if count != self._num_rows:
            self._num_rows = count
            made.put("num_tokens", num_tokens=count)
            made.put("num_rows", num_rows=count, num_parts=num_parts(count))
        made.put("cos", cos=rotation.cos.data_ptr(), sin=rotation.sin.data_ptr())
        made.put("items", **decoding.kernel.parameters_of(decoding.table, self._heads.num_keys))
        stream = self._buffers.stream[:count].copy_(x)
        made.sequence()
        Change(amount=self._buffers.change[:count], factor=self._parts[-1].residual).add_to(stream)
        return stream

    def _made_for(self, decoding: Decoding, rotated: int) -> Made:
        """The calls of this storage, and of so many threads."""
        wanted = decoding.storage, rotated, torch.get_num_threads()
        if self._made is None or self._wanted != wanted:
            layers = [self._layer(parts, decoding, rotated) for parts in self._parts]
            self._made, self._wanted, self._num_rows = Made(self._carrier, layers), wanted, 0
            memory = [decoding.storage.all_positions(number) for number in range(len(self._parts))]
            keys, values = (torch.tensor([both[at].data_ptr() for both in memory]) for at in range(2))
            self._made.put("items", keys=keys, values=values)
        return self._made

    def _layer(self, parts: Parts, decoding: Decoding, rotated: int) -> list[Call]:
        """A layer's calls, in their order."""
        has, heads = self._buffers, self._heads
        query, key, value = has.heads(heads)
        inputs, given, spread, gathered = (calls or [] for calls in self._products(parts))
        turn = self._tokens.call(
            "turn", heads=has.projected.data_ptr(), stride=has.projected.stride(0),
            num_heads=heads.num_queries + heads.num_keys, dim=heads.dim, half=rotated // 2,
        )  # fmt: skip
        gate = self._tokens.call(
            "gate", inputs=has.spread.data_ptr(), output=has.gated.data_ptr(), size=has.gated.shape[1]
        )
        return [
            self._norm(parts.norms[0], parts, is_first=parts is self._parts[0]),
            *inputs,
            turn,
            decoding.kernel.call(query, has.attended, (key, value), scale=self._scoring.scale),
            *given,
            self._norm(parts.norms[1], parts, is_first=False),
            *spread,
            gate,
            *gathered,
        ]

    def _norm(self, norm: RootMeanSquare, parts: Parts, *, is_first: bool) -> Call:
        """Of the stream, with the change before it, which the first norm of all has not."""
        has, (weight, eps) = self._buffers, norm.parameters
        given = {
            "stream": has.stream.data_ptr(), "output": has.normed.data_ptr(), "weight": weight.data_ptr(),
            "size": has.stream.shape[1], "eps": float_bits(eps),
        }  # fmt: skip
        if is_first:
            return self._tokens.call("norm", **given)
        factor = float_bits(parts.residual)
        return self._tokens.call("add_and_norm", **given, change=has.change.data_ptr(), factor=factor)


class Shortcut:
    """Computes layers by a program where there is one for the step, which is tried beside the loop first."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._program = Program.find(layers)
        self._is_tried = False

    def stream(
        self, step: Step, x: Tensor, rotations: Mapping[str, Rotation], by_layers: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """What the layers make of x [tokens, hidden], which may be changed; the same to the last bit either way."""
        program = self._program
        if program is None:
            return by_layers(x)
        rotation = rotations[program.rope]
        decoding = program.decoding(step, x, rotation)
        if decoding is None:
            return by_layers(x)
        if self._is_tried:
            return program.run(x, rotation, decoding)
        found = program.run(x, rotation, decoding).clone()
        expected = by_layers(x)
        self._is_tried = True
        if not torch.equal(found, expected):
            logger.warning("layers are computed one kernel after the other: as a whole they give something else")
            self._program = None
        return expected


def _form(layer: Layer) -> tuple[object, ...]:
    """What layers have to have in common whose calls are to differ in nothing but weights."""
    attention, scoring = layer.attention, layer.attention.scoring
    weighing = scoring.scale, scoring.window, scoring.chunk, scoring.softcap
    return attention.heads, weighing, attention.rope, layer.residual
