"""Takes in the adapters found on disk: their headers are bound, then each is tried on a few tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

from torch import nn

from serve_app.core.cards import AdapterCard
from serve_app.engine.lora.adapter import Adapter, load_adapter
from serve_app.engine.lora.errors import AdapterRefused
from serve_app.engine.lora.probe import probe

logger = logging.getLogger(__name__)


def bind_adapters(found: Items[AdapterCard], module: nn.Module) -> tuple[list[Adapter], tuple[AdapterCard, ...]]:
    """Bind every adapter that fits and passes its probe; give all cards, those that do not with the reason."""
    bound: dict[str, Adapter] = {}
    refused: dict[str, str] = {}
    for card in found:
        if card.is_usable:
            try:
                bound[card.version] = load_adapter(Path(card.root), version=card.version, model=module)
            except AdapterRefused as error:
                refused[card.name] = str(error)
            except Exception as error:  # whatever is wrong with one adapter's files, the model is served
                logger.exception("adapter %s could not be read", card.name)
                refused[card.name] = f"its files could not be read: {error}"
    faults = probe(module, list(bound.values()))
    cards = tuple(_judge(card, bound, refused.get(card.name) or faults.get(card.version)) for card in found)
    return [adapter for version, adapter in bound.items() if version not in faults], cards


def _judge(card: AdapterCard, bound: dict[str, Adapter], reason: str | None) -> AdapterCard:
    if card.is_usable:
        card = replace(card, reason=reason) if reason else replace(card, rank=bound[card.version].rank)
    if not card.is_usable:
        logger.warning("adapter %s is refused: %s", card.name, card.reason)
    return card
