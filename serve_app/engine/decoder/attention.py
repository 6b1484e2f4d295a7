"""Attention of packed tokens over the KV cache, as transformers' `AttentionInterface` calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from serve_app.engine.decoder.step import CurrentStep
from serve_app.engine.decoder.text_part import query_scale, scales_queries
from serve_app.engine.kv.storage import Group, KeyValueShape, Storage
from serve_app.kernels.forms import Scoring

_numbers = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a layer's attention does beyond its arguments; read from its module once, not at every step.

    chunk: how many positions make one chunk, where queries see nothing before their own chunk (Llama 4)
    """

    scales_queries: bool
    chunk: int | None

    @classmethod
    def of(cls, layer: Any) -> Rules:
        config: Any = getattr(layer, "config", None)
        types = getattr(config, "layer_types", None) or {}
        is_chunked = bool(types) and types[layer.layer_idx] == "chunked_attention"
        return cls(scales_queries=scales_queries(layer), chunk=config.attention_chunk_size if is_chunked else None)


class PackedAttention:
    """The attention function of one engine. A model's attention modules find it by `name`.

    Each layer is handed on to the step's plan. Nothing is masked by the model itself.
    """

    def __init__(self, current: CurrentStep, shape: KeyValueShape) -> None:
        self.name = f"serve_app_packed_{next(_numbers)}"
        self._shape = shape
        self._current = current
        self._rules: dict[int, Rules] = {}
        register(self.name, self)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend.

        module: of a family's own kind, with what that has
        query: [1, heads, tokens, key_dim];  key, value: [1, kv_heads, tokens, dim]
        Returns [1, tokens, heads, value_dim].
        """
        step, layer = self._current.step, int(module.layer_idx)
        rules = self._rules.get(layer) or self._rules.setdefault(layer, Rules.of(module))
        tokens = query[0].transpose(0, 1)  # [tokens, heads, key_dim]
        if rules.scales_queries:
            tokens = (tokens * query_scale(module, step.positions)[:, None, None]).to(tokens.dtype)
        is_reader = layer in self._shape.readers
        output = step.attention.run(
            self._shape.places.get(layer, layer),
            tokens,
            None if is_reader else key[0].transpose(0, 1),
            None if is_reader else value[0].transpose(0, 1),
            scoring=Scoring(
                scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
                window=sliding_window,
                chunk=rules.chunk,
                softcap=softcap,
                sinks=s_aux,
            ),
        )
        return output[None], None

    def close(self) -> None:
        """Forget the function; the model it was given to has none then."""
        unregister(self.name)


class GroupedPlan:
    """A plan that reads each group's keys and values from its storage, and attends in torch's own operations."""

    def __init__(self, storage: Storage, groups: Sequence[Group], places: Tensor) -> None:
        self._storage = storage
        self._groups = groups
        self._places = places

    def run(self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, *, scoring: Scoring) -> Tensor:
        if key is not None and value is not None:
            self._storage.write(layer, self._places, key, value)
        output: Tensor | None = None
        for group in self._groups:
            keys, values = self._storage.read(layer, group)
            mask = group.mask(scoring.window, query.dtype, query.device, chunk=scoring.chunk)
            queries, softcap, sinks = group.queries(query), scoring.softcap, scoring.sinks
            attended = attend(queries, keys, values, mask=mask, scale=scoring.scale, softcap=softcap, sinks=sinks)
            output = query.new_empty(*query.shape[:2], attended.shape[-1]) if output is None else output
            group.put(output, attended)
        assert output is not None, "a step has tokens"
        return output


def register(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Let models find an attention function by its name."""
    ALL_ATTENTION_FUNCTIONS.register(name, function)


def unregister(name: str) -> None:
    """Undo `register`, for which transformers has no words of its own."""
    ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend; query heads share key heads in equal parts, in their order.

    query: [rows, length, heads, dim];  key, value: [rows, keys, kv_heads, dim]
    mask:  [rows, 1, length, keys], added to the scores;  sinks: [heads], logits of nothing
    softcap bounds the scores to ±softcap by tanh (Gemma 2, arXiv 2408.00118)

    Returns [rows, length, heads, value_dim].
    """
    if softcap is None and sinks is None:
        if query.shape[1] == 1:
            return _attend_once(query, key, value, mask=mask, scale=scale)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended.transpose(1, 2)
    return _attend_plainly(query, key, value, mask=mask, scale=scale, softcap=softcap, sinks=sinks)


def _attend_once(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """One query per row: the heads that share a key head become its queries, so that keys are read once."""
    rows, _, heads, dim = query.shape
    folded = query.view(rows, key.shape[2], -1, dim)
    attended = F.scaled_dot_product_attention(
        folded, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return attended.reshape(rows, 1, heads, -1)


def _attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """In as many operations as it says, for what the fused kernel does not know."""
    rows, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    folded = query.view(rows, length, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)  # [rows, kv, group, length, dim]
    scores = (folded @ key.permute(0, 2, 3, 1)[:, :, None]) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float()
    if mask is not None:
        scores = scores + mask[:, :, None]
    if sinks is not None:
        column = sinks.view(1, kv_heads, -1, 1, 1).expand(rows, -1, -1, length, 1)
        weights = torch.softmax(torch.cat([scores, column.to(scores.dtype)], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    attended = weights.to(value.dtype) @ value.permute(0, 2, 1, 3)[:, :, None]
    return attended.permute(0, 3, 1, 2, 4).reshape(rows, length, heads, -1)
