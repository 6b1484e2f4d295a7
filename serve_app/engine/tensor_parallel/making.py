"""The bank of adapters of a model that was loaded, whole or divided; with it the followers are ready for steps."""

from __future__ import annotations

from collections.abc import Sequence as Items

from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.kv.budget import check_adapters_fit
from serve_app.engine.lora.adapter import Adapter
from serve_app.engine.lora.buckets import shelf_rank
from serve_app.engine.lora.pool import AdapterBank
from serve_app.engine.tensor_parallel.adapters import LeadingBank
from serve_app.engine.tensor_parallel.orders import Serve


def make_bank(config: EngineConfig, model: LoadedModel, adapters: Items[Adapter]) -> AdapterBank:
    """adapters: as they were bound, in each shard of a divided model

    Raises ModelNotSupported where keys and values leave no room for them.
    """
    shard = model.shard
    if shard is None or shard.crew is None:
        sizes = [_num_bytes(adapter, model) for adapter in adapters]
        check_adapters_fit(config, sizes, budget=model.kv_cache_bytes, vocab_size=model.vocab_size, device=model.device)
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


def _num_bytes(adapter: Adapter, model: LoadedModel) -> int:
    """What an adapter takes where it is resident."""
    num_entries = sum(change.num_entries_per_rank for change in adapter.changes.values())
    return shelf_rank(adapter.rank) * num_entries * model.dtype.itemsize
