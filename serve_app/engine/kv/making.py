"""Makes the KV cache of a loaded model, with the storage that its device wants."""

from __future__ import annotations

from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.decoder.text_part import text_config
from serve_app.engine.kv.lanes import LaneStorage
from serve_app.engine.kv.pages import PageStorage
from serve_app.engine.kv.storage import Storage
from serve_app.engine.kv.store import KeyValueStore
from serve_app.engine.tensor_parallel.workers import ReplicatedStorage
from serve_app.kernels.interface import attention_of_rows


def make_store(config: EngineConfig, model: LoadedModel) -> KeyValueStore:
    """A store of as many blocks as the model's budget holds; of a divided model all shards have a part of each."""
    bytes_per_block = model.shape.bytes_per_token(model.dtype) * config.block_size
    num_blocks = model.kv_cache_bytes // bytes_per_block
    storage = _make_storage(config, model, num_blocks)
    if model.workers is not None:
        storage = ReplicatedStorage(storage, model.workers.note)
    return KeyValueStore(
        storage,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_places=config.num_places,
        num_spare=config.num_spare_places,
        bytes_per_block=bytes_per_block * config.tensor_parallel,
    )


def _make_storage(config: EngineConfig, model: LoadedModel, num_blocks: int) -> Storage:
    if config.is_paged(model.device.type):
        return PageStorage(
            model.shape,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=model.dtype,
            device=model.device,
            kernels=model.kernels,
            max_model_len=model.max_model_len,
        )
    _prepare_kernels(model)
    return LaneStorage(
        model.shape,
        num_lanes=config.num_places,
        max_model_len=model.max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=model.dtype,
    )


def _prepare_kernels(model: LoadedModel) -> None:
    """Have what attends on CPUs made before a sequence waits for it."""
    num_heads = getattr(text_config(model.module.config), "num_attention_heads", None)
    for layer in set(model.shape.layers):
        if isinstance(num_heads, int) and layer.key_dim == layer.value_dim and num_heads % layer.heads == 0:
            attention_of_rows(num_heads // layer.heads, layer.key_dim, model.dtype)
