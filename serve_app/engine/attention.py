"""Attention of packed tokens over the key/value store, as transformers' `AttentionInterface` calls it."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from serve_app.engine.kv.store import KeyValueStore
from serve_app.engine.layout import Attended, Layout

_numbers = count()


class PackedAttention:
    """The attention function of one engine.

    A model's attention modules find it by `name`; before a forward the runner sets `layout`, and `store` is
    written and read at the module's layer. Nothing is masked by the model itself.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self.name = f"serve_app_packed_{next(_numbers)}"
        self.store = store
        self.layout: Layout | None = None
        ALL_ATTENTION_FUNCTIONS.register(self.name, self)

    def __call__(
        self,
        module: nn.Module,
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

        query: [1, heads, tokens, key_dim];  key, value: [1, kv_heads, tokens, dim]
        Returns [1, tokens, heads, value_dim].
        """
        layout = self.layout
        assert layout is not None, "attention outside of a step"
        layer = int(module.layer_idx)
        keys, values = self._write(layer, key[0], value[0], layout)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        heads, kv_heads = query.shape[1], key.shape[1]
        tokens = query[0].transpose(0, 1)  # [tokens, heads, key_dim]
        output = query.new_empty(tokens.shape[0], heads, value.shape[-1])
        for group in layout.attended:
            span = slice(group.first_token, group.first_token + group.num_tokens)
            lanes = slice(group.first_lane, group.first_lane + group.num_lanes)
            queries = _fold_heads(tokens[span], group, kv_heads)
            mask = group.mask(sliding_window, query.device)
            attended = attend(
                queries,
                keys[lanes, : group.num_keys].transpose(1, 2),
                values[lanes, : group.num_keys].transpose(1, 2),
                mask=None if mask is None else mask.repeat(1, 1, heads // kv_heads, 1),
                scale=scale,
                softcap=softcap,
                sinks=None if s_aux is None else s_aux.view(kv_heads, -1, 1).expand(-1, -1, group.length),
            )
            output[span] = _unfold_heads(attended, group, heads)
        return output[None], None

    def _write(self, layer: int, key: Tensor, value: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Put the new keys and values in their places; return the layer's [lanes, length, kv_heads, dim]."""
        keys, values = self.store.keys[layer], self.store.values[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, layout.places, key.transpose(0, 1))
        values.view(-1, *values.shape[2:]).index_copy_(0, layout.places, value.transpose(0, 1))
        return keys, values


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
    """Attend with the query heads that share a kv head folded into the rows.

    query: [lanes, kv_heads, rows, dim];  key, value: [lanes, kv_heads, keys, dim]
    mask:  [lanes, 1, rows, keys] bool, True is seen;  sinks: [kv_heads, group, length], logits of nothing
    softcap bounds the scores to ±softcap by tanh (Gemma 2, arXiv 2408.00118)
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = (query @ key.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.reshape(1, sinks.shape[0], -1, 1).expand(scores.shape[0], -1, -1, -1)
        scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return weights.to(value.dtype) @ value


def _fold_heads(tokens: Tensor, group: Attended, kv_heads: int) -> Tensor:
    """[lanes * length, heads, dim] -> [lanes, kv_heads, heads/kv_heads * length, dim]."""
    _, heads, dim = tokens.shape
    split = tokens.reshape(group.num_lanes, group.length, kv_heads, heads // kv_heads, dim)
    return split.permute(0, 2, 3, 1, 4).reshape(group.num_lanes, kv_heads, -1, dim)


def _unfold_heads(attended: Tensor, group: Attended, heads: int) -> Tensor:
    """The reverse of `_fold_heads`: [lanes, kv_heads, heads/kv_heads * length, dim] -> [lanes * length, heads, dim]."""
    lanes, kv_heads, _, dim = attended.shape
    split = attended.reshape(lanes, kv_heads, heads // kv_heads, group.length, dim)
    return split.permute(0, 3, 1, 2, 4).reshape(lanes * group.length, heads, dim)
