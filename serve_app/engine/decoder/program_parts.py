"""What the calls of a decoder's layers are made of: the products of each, and the memory that lies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

from serve_app.engine.cpu.calling import float_bits
from serve_app.engine.cpu.products import LaidOut
from serve_app.engine.cpu.sequence import Call, Spare
from serve_app.engine.cpu.tokens import TokenKernels
from serve_app.engine.decoder.layer import Heads, Layer, Product
from serve_app.engine.decoder.norm import HeadNorms, RootMeanSquare
from serve_app.engine.lora.modules import Parts as Changes
from serve_app.engine.quantized.int8_kernels import RoundedRows

MOST_ROWS = 192
"""Tokens of a step, beyond which what the interpreter takes is not felt: so much memory is kept for what lies between,
8 MB for Qwen2.5-0.5B."""
Multiplier: TypeAlias = LaidOut | RoundedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a layer is, where all of it is kernels'.

    products: queries, keys and values; behind attention; both halves of the MLP, and behind it
    changes:  what adapters make of each product
    norms:    before attention, and before the MLP
    of_heads: norms of queries and keys, if there are any
    """

    products: tuple[Multiplier, Multiplier, Multiplier, Multiplier]
    changes: tuple[Changes, ...]
    norms: tuple[RootMeanSquare, RootMeanSquare]
    of_heads: HeadNorms | None
    residual: float

    @property
    def form(self) -> tuple[object, ...]:
        return self.of_heads is None, *((type(each), each.num_outputs) for each in self.products)

    @classmethod
    def find(cls, layer: Layer) -> Parts | None:
        attention, mlp = layer.attention, layer.mlp
        others = attention.clip, attention.scoring.sinks, layer.after_attention, layer.after_mlp
        if any(each is not None for each in others) or attention.rope is None or not mlp.is_silu:
            return None
        of_heads = attention.head_norms
        size = None if of_heads is None else len(of_heads.weights[0])
        if attention.query_norm is not None and size != attention.heads.dim:
            return None
        norms = layer.before_attention, layer.before_mlp
        whole = [each for each in (attention.inputs, attention.output, mlp.inputs, mlp.output) if _is_whole(each)]
        products = [each.ours for each in whole if each.ours is not None]
        if not isinstance(norms[0], RootMeanSquare) or not isinstance(norms[1], RootMeanSquare) or len(products) != 4:
            return None
        changes = tuple(each.changes for each in whole)
        first, second, third, fourth = products
        return cls(
            products=(first, second, third, fourth), changes=changes, norms=(norms[0], norms[1]), of_heads=of_heads,
            residual=layer.residual,
        )  # fmt: skip


def _is_whole(product: object) -> TypeGuard[Product]:
    """Not of a divided model, whose parts are summed up."""
    return isinstance(product, Product)


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

    def products(self, parts: Parts) -> list[list[Call] | None]:
        """The calls of each; None for one that another's kernel would compute."""
        return [each.calls(x, y, self.spare) for each, (x, y) in zip(parts.products, self.of_products, strict=True)]

    def turning(self, tokens: TokenKernels, of: Heads, norms: HeadNorms | None, rotated: int) -> list[Call]:
        """Of queries and keys: their norms, if there are any, and so many dimensions are rotated."""
        heads = {
            "heads": self.projected.data_ptr(), "stride": self.projected.stride(0),
            "num_heads": of.num_queries + of.num_keys, "dim": of.dim,
        }  # fmt: skip
        turn = tokens.call("turn", **heads, half=rotated // 2)
        if norms is None:
            return [turn]
        (query, key), eps = norms.weights, float_bits(norms.eps)
        addresses = {"query_weight": query.data_ptr(), "key_weight": key.data_ptr()}
        return [tokens.call("norm_heads", **heads, **addresses, num_queries=of.num_queries, eps=eps), turn]

    def turned(self, of: Heads, count: int) -> Tensor:
        """Queries and keys of some tokens, [count, heads, dim]."""
        return self.projected[:count].view(count, -1, of.dim)[:, : of.num_queries + of.num_keys]

    def heads(self, of: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of what is projected, each [MOST_ROWS, heads, dim]."""
        split = self.projected.view(MOST_ROWS, -1, of.dim)
        query, key, value = split.split([of.num_queries, of.num_keys, of.num_keys], dim=1)
        return query, key, value


def _empty(size: int) -> Tensor:
    return torch.empty(MOST_ROWS, size, dtype=torch.bfloat16)
