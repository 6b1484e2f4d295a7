"""Registers the adapters found on disk: binds each to the model, then tries it. Checks use the same code."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from serve_app.core.cards import AdapterCard, AdapterRecord
from serve_app.engine.decoder.config_check import check_config, choose_dtype, shapes_of
from serve_app.engine.decoder.text_part import text_config
from serve_app.engine.lora.adapter import Adapter, bind_adapter, read_weights
from serve_app.engine.lora.matching import AdapterRefused, Matcher, head_name
from serve_app.engine.lora.probe import probe
from serve_app.engine.tensor_parallel.workers import Bind, Shard
from serve_app.engine.vision.support import VisionSupport

logger = logging.getLogger(__name__)


def bind_adapters(
    found: Items[AdapterRecord],
    module: PreTrainedModel,
    *,
    shard: Shard | None = None,
    sees: bool = False,
    matcher: Matcher | None = None,
) -> tuple[list[Adapter], tuple[AdapterCard, ...]]:
    """Bind every adapter that fits and passes its probe; give all cards, those that do not with the reason.

    shard:   of a model that is divided; all shards do this together
    sees:    whether images are served
    matcher: None makes one
    """
    if shard is not None and shard.workers is not None:
        shard.workers.tell(Bind(records=tuple(found)))
    matcher = matcher or (Matcher.of(module, sees=sees) if found else None)
    bound, refused = _bind(found, matcher, is_divided=shard is not None)
    versions = {adapter.version: adapter for adapter in bound.values()}
    faults = probe(module, list(versions.values()), shard=shard)
    cards = []
    for record in found:
        reason = refused.get(record.name) or faults.get(record.version)
        if reason is not None:
            logger.warning("adapter %s is refused: %s", record.name, reason)
            cards.append(replace(record.card(), reason=reason))
            continue
        adapter = bound[record.name]
        for note in adapter.notes:
            logger.warning("adapter %s: %s", record.name, note)
        cards.append(replace(record.card(), rank=adapter.rank, keeps_prefix=keeps_prefix(adapter.changes, module)))
    return [adapter for version, adapter in versions.items() if version not in faults], tuple(cards)


def judge_adapters(
    found: Items[AdapterRecord], path: Path, *, dtype: str, images: bool, tensor_parallel: int
) -> dict[str, Adapter | str]:
    """Say of each adapter, by its name, what it is bound to or why it is refused; all but what a probe would find.

    path: of the model, whose weights are not read; the rest is as in its configuration

    Raises ModelNotSupported.
    """
    judged = check_config(path, with_images=images)
    shapes: Any = shapes_of(judged)
    numbers = choose_dtype(dtype, judged.dtype, torch.device("cpu"))
    matcher = Matcher.of(shapes, sees=isinstance(judged.vision, VisionSupport)) if found else None
    bound, refused = _bind(found, matcher, is_divided=tensor_parallel > 1)
    for name, adapter in bound.items():
        try:
            read_weights(adapter, shapes, None, dtype=numbers)
        except AdapterRefused as error:
            refused[name] = str(error)
    return {**bound, **refused}


def _bind(
    found: Items[AdapterRecord], matcher: Matcher | None, *, is_divided: bool
) -> tuple[dict[str, Adapter], dict[str, str]]:
    """Those that fit, and the reasons of the others, by name."""
    bound: dict[str, Adapter] = {}
    refused: dict[str, str] = {}
    for record in found:
        try:
            assert matcher is not None, "there is something to match"
            bound[record.name] = bind_adapter(record, matcher, is_divided=is_divided)
        except AdapterRefused as error:
            refused[record.name] = str(error)
        except Exception as error:  # whatever is wrong with one adapter's files, the model is served
            logger.exception("adapter %s could not be read", record.name)
            refused[record.name] = f"its files could not be read: {error}"
    return bound, refused


BEHIND_KEYS = frozenset(
    {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj"}
)
"""Of a layer, what makes neither keys nor values, nor what they are made from."""


def keeps_prefix(modules: Iterable[str], model: nn.Module) -> bool:
    """Whether changes to these modules change no key and no value of any token.

    Keys and values of a layer follow from all layers before it, so only the head may be changed, and of the last layer
    what makes queries or comes behind attention. Few adapters are like that; where it is not known, it is False.
    """
    config: Any = text_config(model.config)
    last = f"layers.{int(getattr(config, 'num_hidden_layers', 0)) - 1}."
    others = {name for name in modules if _place(name, last) not in BEHIND_KEYS}
    return len(others) < 2 and others <= {head_name(model)}


def _place(name: str, last: str) -> str:
    """A module's name within the last layer; "" outside of it."""
    before, sign, within = name.rpartition(f".{last}")
    return within if sign and "layers." not in before else ""
