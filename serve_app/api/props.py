"""The bodies of routes that only tell: llama.cpp's GET /props and GET /lora-adapters, vLLM's GET /tokenizer_info."""

from __future__ import annotations

from serve_app.api.native import native_defaults
from serve_app.core.cards import ModelCard

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def props_body(card: ModelCard) -> dict[str, object]:
    """What llama.cpp says of the model of a server. Nothing here can be changed by POST."""
    return {
        "default_generation_settings": {"n_ctx": card.max_model_len, "params": native_defaults()},
        "model_alias": card.name,
        "model_path": card.root,
        "n_ctx": card.max_model_len,
        "n_vocab": card.vocab_size,
        "modalities": {"vision": card.images is not None and card.images.takes_images, "audio": False},
        "chat_template": card.chat_template,
        "is_sleeping": False,
    }


def tokenizer_body(card: ModelCard) -> dict[str, object]:
    """What vLLM says of a model's tokenizer; of the usual special tokens those that it does not have are null."""
    return {
        "tokenizer_class": card.tokenizer.kind,
        "model_max_length": card.max_model_len,
        **dict.fromkeys(SPECIAL_TOKENS),
        **dict(card.tokenizer.special_tokens),
        "chat_template": card.chat_template or None,
    }


def adapters_body(card: ModelCard) -> list[dict[str, object]]:
    """The adapters that a request's `lora` refers to by number; none is applied to requests that name none."""
    usable = [adapter for adapter in card.adapters if adapter.is_usable]
    return [
        {"id": number, "path": adapter.root or adapter.name, "scale": 0.0, "name": f"{card.name}:{adapter.name}"}
        for number, adapter in enumerate(usable)
    ]
