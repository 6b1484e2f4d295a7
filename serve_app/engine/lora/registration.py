"""Takes in the adapters found on disk: each is bound to the model, then tried on a few tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import replace

from torch import nn

from serve_app.core.adapters import AdapterRecord
from serve_app.core.cards import AdapterCard
from serve_app.engine.lora.adapter import Adapter, bind_adapter
from serve_app.engine.lora.errors import AdapterRefused
from serve_app.engine.lora.prefix import keeps_prefix
from serve_app.engine.lora.probe import probe
from serve_app.engine.shards.orders import Bind
from serve_app.engine.shards.shard import Shard

logger = logging.getLogger(__name__)


def bind_adapters(
    found: Items[AdapterRecord], module: nn.Module, *, shard: Shard | None = None
) -> tuple[list[Adapter], tuple[AdapterCard, ...]]:
    """Bind every adapter that fits and passes its probe; give all cards, those that do not with the reason.

    shard: of a model that is divided; all shards do this together
    """
    if shard is not None and shard.crew is not None:
        shard.crew.tell(Bind(records=tuple(found)))
    division = None if shard is None else shard.division
    bound: dict[str, Adapter] = {}
    refused: dict[str, str] = {}
    for record in found:
        try:
            bound[record.version] = bind_adapter(record, module, division=division)
        except AdapterRefused as error:
            refused[record.name] = str(error)
        except Exception as error:  # whatever is wrong with one adapter's files, the model is served
            logger.exception("adapter %s could not be read", record.name)
            refused[record.name] = f"its files could not be read: {error}"
    faults = probe(module, list(bound.values()), shard=shard)
    cards = tuple(_judge(record, module, refused.get(record.name) or faults.get(record.version)) for record in found)
    return [adapter for version, adapter in bound.items() if version not in faults], cards


def _judge(record: AdapterRecord, module: nn.Module, reason: str | None) -> AdapterCard:
    if reason is not None:
        logger.warning("adapter %s is refused: %s", record.name, reason)
        return replace(record.card(), reason=reason)
    return replace(record.card(), reason=None, keeps_prefix=keeps_prefix(record.changes, module))
