"""Settles once what a rotary embedding would otherwise decide anew in every forward, by the batch that it sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE = "longrope"


def settle_longrope(module: nn.Module, max_model_len: int) -> None:
    """Fix LongRoPE's frequencies (arXiv 2402.13753), short or long, by the context that is served.

    transformers takes the long ones as soon as the longest row of a batch exceeds the length the model was first
    trained at: what a sequence gets would depend on its company, and keys that are cached already would not fit any
    more. Here a context beyond that length has the long ones for every sequence, short ones included, and a context
    within it the short ones.
    """
    for rotary in _rotaries(module):
        original = int(rotary.parameters["original_max_position_embeddings"])
        chosen_for = original + 1 if max_model_len > original else original
        layer_type = {} if rotary.layer_type is None else {"layer_type": rotary.layer_type}
        embedding = rotary.embedding
        frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](
            embedding.config, next(embedding.buffers()).device, seq_len=chosen_for, **layer_type
        )
        for name in ("inv_freq", "original_inv_freq", "long_inv_freq"):  # it picks one of the last two: they are one
            setattr(embedding, rotary.prefix + name, frequencies.clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rotary:
    """One embedding that is LongRoPE, where layers differ for one type of layers."""

    embedding: Any
    layer_type: str | None
    parameters: dict[str, Any]

    @property
    def prefix(self) -> str:
        return "" if self.layer_type is None else f"{self.layer_type}_"


def _rotaries(module: nn.Module) -> Iterator[_Rotary]:
    embedding: Any  # of transformers' many kinds
    for embedding in module.modules():
        kind = getattr(embedding, "rope_type", None)
        if kind == LONGROPE:
            yield _Rotary(embedding=embedding, layer_type=None, parameters=embedding.config.rope_parameters)
        elif isinstance(kind, dict):
            for layer_type in (each for each, its_kind in kind.items() if its_kind == LONGROPE):
                parameters = embedding.config.rope_parameters[layer_type]
                yield _Rotary(embedding=embedding, layer_type=layer_type, parameters=parameters)
