"""What an engine knows of its model, as routers are told."""

from __future__ import annotations

from serve_app.core.cards import ModelCard
from serve_app.core.images import ImageCard
from serve_app.core.names import MAX_MIXED_ADAPTERS
from serve_app.engine.config import EngineConfig
from serve_app.engine.loading import LoadedModel
from serve_app.text.tokenizer import TextTokenizer


def card_of(model: LoadedModel, config: EngineConfig, tokenizer: TextTokenizer) -> ModelCard:
    """Its card, without what is known outside of the engine: origin, adapters, dialect and template."""
    return ModelCard(
        name=config.name,
        root=config.path,
        created=0,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        max_num_sequences=config.max_num_sequences,
        max_waiting=config.max_waiting,
        kv_cache_bytes=model.kv_cache_bytes,
        tokenizer=tokenizer.card,
        images=_image_card(model),
        max_mixed_adapters=min(MAX_MIXED_ADAPTERS, config.max_adapters),
    )


def _image_card(model: LoadedModel) -> ImageCard | None:
    if model.eyes is not None:
        return ImageCard(marker=model.eyes.marker)
    return None if model.blindness is None else ImageCard(reason=model.blindness)
