"""One layer of a llama-like decoder: what it computes, as data and modules that are looked up once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.cpu.products import LaidOut
from serve_app.engine.cpu.tokens import token_kernels
from serve_app.engine.decoder.linears import LinearPart, OneDnnWeight, PackedLinear
from serve_app.engine.decoder.norm import Change, HeadNorms, Norm, added_and_normed
from serve_app.engine.kv.plan import Scoring
from serve_app.engine.lora.modules import BankedLinear, Parts
from serve_app.engine.quantized.int8_kernels import RoundedRows
from serve_app.engine.quantized.linear import QuantisedLinear
from serve_app.engine.tensor_parallel.collectives import Collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """What turns queries and keys at their positions (arXiv 2104.09864), the same in all layers of one kind.

    cos, sin: [tokens, 1, rotated], sin negative in its first half
    """

    cos: Tensor
    sin: Tensor

    def turn(self, heads: Tensor) -> Tensor:
        """[tokens, heads, dim], which may be changed in place; dimensions beyond those that are rotated stay."""
        size = self.cos.shape[-1]
        kernels = token_kernels(heads.dtype) if heads.device.type == "cpu" else None
        if kernels is not None and kernels.turns(heads, self.cos, self.sin):
            kernels.turn(heads, self.cos, self.sin)
            return heads
        turned = heads if size == heads.shape[-1] else heads[..., :size]
        turned = torch.addcmul(turned * self.cos, turned.roll(size // 2, -1), self.sin).to(heads.dtype)
        return turned if size == heads.shape[-1] else torch.cat([turned, heads[..., size:]], dim=-1)


class Product:
    """Linears that read the same input, as one product where they are joined, with what adapters change of each.

    changes: those
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        """modules: as they are in the model; parts of a joint linear are all there, in their order"""
        bases = [each.base if isinstance(each, BankedLinear) else each for each in modules]
        wholes = [base.joint.whole if isinstance(base, LinearPart) else base for base in bases]
        self._wholes = list(dict.fromkeys(wholes))
        changes, begin = [], 0
        for module, base in zip(modules, bases, strict=True):
            end = begin + int(base.out_features)  # type: ignore[arg-type]
            if isinstance(module, BankedLinear):
                changes.append((begin, end, module))
            begin = end
        self.changes = Parts(changes)

    @property
    def ours(self) -> LaidOut | RoundedRows | None:
        """What multiplies rows that no adapter changes, where that is kernels of our own."""
        whole = self._wholes[0] if len(self._wholes) == 1 else None
        if isinstance(whole, QuantisedLinear):
            return whole.ours
        kept = whole.kept if isinstance(whole, PackedLinear) else None
        return kept.ours if isinstance(kept, OneDnnWeight) else None

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, inputs] to [tokens, outputs]"""
        y: Tensor = self._wholes[0](x)
        if len(self._wholes) > 1:
            y = torch.cat([y, *(whole(x) for whole in self._wholes[1:])], dim=-1)
        self.changes.change(y, x)
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """num_queries, num_keys: heads of queries, and of keys or values;  dim: of each"""

    num_queries: int
    num_keys: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """query_norm, key_norm: of each head, or where `norms_rows` of all of them together
    clip:      bounds queries, keys and values to ±clip
    rope:      which rotation; None where positions are not told
    scoring:   how keys are weighed
    """

    heads: Heads
    inputs: Product
    output: Callable[[Tensor], Tensor]
    query_norm: Norm | None
    key_norm: Norm | None
    norms_rows: bool
    clip: float | None
    rope: str | None
    scoring: Scoring

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim]."""
        joined, heads = self.inputs(x), self.heads
        if self.clip is not None:
            joined.clamp_(-self.clip, self.clip)
        if self.norms_rows:
            self._norm_rows(joined)
        split = joined.view(joined.shape[0], -1, heads.dim)
        turned, value = split.tensor_split([heads.num_queries + heads.num_keys], dim=1)
        if not self.norms_rows and self.query_norm is not None:
            turned = self._normed_heads(turned)
        if rotation is not None:
            turned = rotation.turn(turned)
        query, key = turned.tensor_split([heads.num_queries], dim=1)
        return query, key, value

    @property
    def head_norms(self) -> HeadNorms | None:
        """Of each head, where kernels compute them."""
        if self.norms_rows or self.query_norm is None or self.key_norm is None:
            return None
        return HeadNorms.find(self.query_norm, self.key_norm)

    def _normed_heads(self, turned: Tensor) -> Tensor:
        """Queries and keys, [tokens, heads, dim], which may be changed."""
        assert self.query_norm is not None
        assert self.key_norm is not None
        norms, num_queries = self.head_norms, self.heads.num_queries
        if norms is not None and norms.change(turned, num_queries):
            return turned
        query, key = turned.tensor_split([num_queries], dim=1)
        return torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)

    def _norm_rows(self, joined: Tensor) -> None:
        assert self.query_norm is not None
        assert self.key_norm is not None
        end = self.heads.num_queries * self.heads.dim
        query, key = joined[:, :end], joined[:, end : end + self.heads.num_keys * self.heads.dim]
        query.copy_(self.query_norm(query))
        key.copy_(self.key_norm(key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """activation: of the first half of what `inputs` gives, before that is multiplied by the second"""

    inputs: Product
    activation: Callable[[Tensor], Tensor]
    output: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        inputs = self.inputs(x)
        return self.output(self._gated(inputs))

    @property
    def is_silu(self) -> bool:
        return self.activation is F.silu

    def _gated(self, inputs: Tensor) -> Tensor:
        if self.is_silu and inputs.device.type == "cpu":
            kernels = token_kernels(inputs.dtype)
            if kernels is not None and inputs.is_contiguous() and kernels.takes(inputs, inputs.shape[1] // 2):
                return kernels.gate(inputs)
        gate, up = inputs.chunk(2, dim=-1)
        return self.activation(gate).mul_(up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Norms are None where a family has none at that place.

    residual: what is added to the stream is multiplied by it
    """

    attention: Attention
    mlp: Mlp
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    residual: float = 1.0

    def summed(self, sums: Collectives) -> Layer:
        """The same of a divided model: what attention and MLP give, adapters' changes included, is a part of a sum."""
        attention, mlp = self.attention, self.mlp
        return replace(
            self,
            attention=replace(attention, output=lambda x: sums.total(attention.output(x))),
            mlp=replace(mlp, output=lambda x: sums.total(mlp.output(x))),
        )

    def begin(self, x: Tensor, change: Change | None) -> Tensor:
        """What attention is computed of. Changes the stream x [tokens, hidden] in place.

        change: of the layer before
        """
        return added_and_normed(x, change, self.before_attention)

    def finish(self, x: Tensor, attended: Tensor) -> Change:
        """What follows attention; changes the stream in place, and gives what is to be added to it at last.

        attended: [tokens, heads · dim]
        """
        change = self._change(self.attention.output(attended), self.after_attention)
        return self._change(self.mlp(added_and_normed(x, change, self.before_mlp)), self.after_mlp)

    def _change(self, found: Tensor, norm: Norm | None) -> Change:
        return Change(amount=found if norm is None else norm(found), factor=self.residual)


def activation_of(module: Any) -> Callable[[Tensor], Tensor]:
    """An activation of transformers, by torch's own function where there is one: it makes a new tensor."""
    if type(module).__name__ in {"SiLU", "SiLUActivation"}:
        return F.silu
    activation: Callable[[Tensor], Tensor] = module
    return activation
