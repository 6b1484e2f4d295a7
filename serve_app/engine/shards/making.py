"""The bank of adapters of a model that was loaded, whole or divided; with it the followers are ready for steps."""

from __future__ import annotations

from collections.abc import Sequence as Items

from serve_app.engine.config import EngineConfig
from serve_app.engine.loading import LoadedModel
from serve_app.engine.lora.adapter import Adapter
from serve_app.engine.lora.bank import AdapterBank
from serve_app.engine.shards.adapters import LeadingBank
from serve_app.engine.shards.orders import Serve


def make_bank(config: EngineConfig, model: LoadedModel, adapters: Items[Adapter]) -> AdapterBank:
    """adapters: as they were bound, in each shard of a divided model"""
    shard = model.shard
    if shard is None or shard.crew is None:
        return AdapterBank(model.module, adapters, max_slots=config.max_adapters, uses_triton=model.uses_triton)
    shard.crew.tell(Serve(versions=tuple(adapter.version for adapter in adapters)))
    return LeadingBank(
        model.module,
        adapters,
        division=shard.division,
        crew=shard.crew,
        max_slots=config.max_adapters,
        uses_triton=model.uses_triton,
    )
