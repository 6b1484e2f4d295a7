"""What a replica says of its model, from what was loaded and how it is configured."""

from __future__ import annotations

from serve_app.core.cards import AdapterCard, ModelCard
from serve_app.core.names import MAX_MIXED_ADAPTERS
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.decoder.record import record_card
from serve_app.engine.vision.looking import image_card
from serve_app.templates.chat_template import ChatTemplate
from serve_app.text.tokenizer import TextTokenizer


def model_card(
    config: EngineConfig,
    model: LoadedModel,
    tokenizer: TextTokenizer,
    adapters: tuple[AdapterCard, ...],
    *,
    root: str | None,
    created: int,
    dialect: str | None,
    chat_template: str,
) -> ModelCard:
    """For the routers; the last four as `ModelService.load` has them."""
    return ModelCard(
        name=config.name,
        root=root or config.path,
        created=created,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        adapters=adapters,
        dialect=dialect,
        max_num_sequences=config.max_num_sequences,
        max_waiting=config.max_waiting,
        kv_cache_bytes=model.kv_cache_bytes * config.tensor_parallel,
        chat_template=chat_template,
        records=record_card(config, model.module),
        tokenizer=tokenizer.card,
        images=image_card(model),
        max_mixed_adapters=min(MAX_MIXED_ADAPTERS, config.max_adapters),
        fills_gaps=tokenizer.markers is not None,
    )


def template_of(card: ModelCard, tokenizer: TextTokenizer) -> ChatTemplate:
    """The model's chat template, ready to render."""
    return ChatTemplate(
        card.chat_template,
        tool_template=card.tool_template,
        tells_form=None if card.tool_prompt == "ignore" else card.tool_parser in (None, "hermes", "qwen"),
        model_name=card.name,
        special_names=tuple(name for name, _ in tokenizer.special_names),
        special_tokens=dict(card.tokenizer.special_tokens),
    )
