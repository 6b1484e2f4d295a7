"""The bodies of llama.cpp's read-only routes: GET /props and GET /lora-adapters."""

from __future__ import annotations

from serve_app.api.native import native_defaults
from serve_app.core.cards import ModelCard


def props_body(card: ModelCard) -> dict[str, object]:
    """What llama.cpp says of the model of a server. Nothing here can be changed by POST."""
    return {
        "default_generation_settings": {"n_ctx": card.max_model_len, "params": native_defaults()},
        "model_alias": card.name,
        "model_path": card.root,
        "n_ctx": card.max_model_len,
        "n_vocab": card.vocab_size,
        "modalities": {"vision": False, "audio": False},
        "chat_template": card.chat_template,
        "is_sleeping": False,
    }


def adapters_body(card: ModelCard) -> list[dict[str, object]]:
    """The adapters that a request's `lora` refers to by number; none is applied to requests that name none."""
    usable = [adapter for adapter in card.adapters if adapter.is_usable]
    return [
        {"id": number, "path": adapter.root or adapter.name, "scale": 0.0, "name": f"{card.name}:{adapter.name}"}
        for number, adapter in enumerate(usable)
    ]
