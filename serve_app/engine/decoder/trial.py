"""Tries the loop beside the model that it is built from, before it serves."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from serve_app.engine.decoder.building import NotDescribed, Scorings, build_loop, family_of
from serve_app.engine.decoder.layout import lay_out
from serve_app.engine.decoder.probe import CHUNKS, FEW_CHUNKS, Witness, check, compute_in_steps, distance, storage_for
from serve_app.engine.tensor_parallel.collectives import Collectives

logger = logging.getLogger(__name__)


def settle(module: PreTrainedModel, witness: Witness, *, sums: Collectives | None = None) -> Scorings | None:
    """Lay a model's linears out for this machine and check it; say with what the loop is built where it may serve.

    sums: of a divided model, of which all shards are computed by the loop, or none

    Raises ModelNotSupported.
    """
    is_described = family_of(module) is not None
    lay_out(module, joins=is_described)
    reason = _try_loop(module, witness, sums) if is_described else None
    has_loop = is_described and reason is None
    if sums is not None:
        has_loop = bool(sums.least(has_loop))
    check(module, witness, chunks=FEW_CHUNKS if has_loop else CHUNKS)  # modules compute what recorders watch
    if reason is not None:
        logger.warning("%s: computed by transformers' modules, not by the loop: %s", module.config.model_type, reason)
    return witness.scorings if has_loop else None


@torch.inference_mode()
def _try_loop(module: PreTrainedModel, witness: Witness, sums: Collectives | None) -> str | None:
    """Why the loop may not serve; None where it gives the model's own logits."""
    try:
        loop = build_loop(module, witness.shape, witness.scorings, sums=sums)
        ours = compute_in_steps(witness, storage_for(module, witness), lambda step, _: loop(step))
    except (NotDescribed, RuntimeError, AttributeError, TypeError, ValueError) as error:
        return str(error)
    difference, limit = distance(witness, ours, module.dtype)
    return None if difference <= limit else f"its logits are off by {difference:.2g} (allowed: {limit:.2g})"
