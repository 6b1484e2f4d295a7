"""Tries the loop beside the model that it is built from, before it serves."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from serve_app.engine.attention import PackedAttention
from serve_app.engine.decoder.building import Attending, NotDescribed, build_loop, family_of
from serve_app.engine.decoder.layer import Layer
from serve_app.engine.decoder.layout import join_linears, pack_linears
from serve_app.engine.probe import Witness, check, compute_in_steps, distance, storage_for
from serve_app.engine.step import CurrentStep, Step

logger = logging.getLogger(__name__)


class StoredAttention:
    """How the loop attends: through the engine's attention, as the model's own module would."""

    def __init__(self, attention: PackedAttention, current: CurrentStep) -> None:
        self._attention = attention
        self._current = current

    def __call__(self, step: Step, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        inner: Any = layer.attention
        heads = (each.transpose(0, 1)[None] for each in (query, key, value))
        with self._current.running(step):
            attended, _ = self._attention(inner.module, *heads, None, **inner.attending)
        return attended[0]


def settle(module: PreTrainedModel, witness: Witness) -> Attending | None:
    """Lay a model's linears out for this machine and check it; say with what the loop is built where it may serve.

    Raises ModelNotSupported.
    """
    if family_of(module) is not None:
        join_linears(module.get_decoder())
    pack_linears(module)
    check(module, witness)
    if family_of(module) is None:
        return None
    reason = _try_loop(module, witness)
    if reason is not None:
        logger.warning("%s: computed by transformers' modules, not by the loop: %s", module.config.model_type, reason)
        return None
    return witness.attending


@torch.inference_mode()
def _try_loop(module: PreTrainedModel, witness: Witness) -> str | None:
    """Why the loop may not serve; None where it gives the model's own logits."""
    current, storage = CurrentStep(), storage_for(module, witness)
    attention = PackedAttention(storage, current, witness.shape)
    try:
        loop = build_loop(module, witness.shape, witness.attending, StoredAttention(attention, current))
        ours = compute_in_steps(witness, storage, lambda step, _: loop(step))
    except (NotDescribed, RuntimeError, AttributeError, TypeError, ValueError) as error:
        return str(error)
    finally:
        attention.close()
    difference, limit = distance(witness, ours, module.dtype)
    return None if difference <= limit else f"its logits are off by {difference:.2g} (allowed: {limit:.2g})"
