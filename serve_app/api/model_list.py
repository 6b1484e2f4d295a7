"""The list of models as clients see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serve_app.core.cards import ModelCard
from serve_app.core.names import ModelRef

OWNER = "serve_app"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One name that a client may send as `model`.

    root:   where its weights came from
    parent: the base of an adapter, the target of an alias
    default_sampling: of requests that do not send it, in dialects that have it of the model
    """

    id: str
    created: int
    root: str
    parent: str | None
    max_model_len: int | None
    default_sampling: tuple[tuple[str, float], ...] = ()

    def body(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": OWNER,
            "root": self.root,
            "parent": self.parent,
            "max_model_len": self.max_model_len,
            "default_sampling": dict(self.default_sampling),
        }


def list_models(cards: Iterable[ModelCard], aliases: Mapping[str, ModelRef]) -> list[ModelEntry]:
    """Every base, each followed by its usable adapters, then the aliases that lead anywhere."""
    cards = list(cards)
    entries: dict[str, ModelEntry] = {}
    for card in sorted(cards, key=lambda card: card.name):
        entries[card.name] = _base_entry(card)
        for adapter in card.adapters:
            if adapter.is_usable:
                entry = _adapter_entry(card, f"{card.name}:{adapter.name}", adapter.root)
                entries[entry.id] = entry
    for alias, target in aliases.items():
        base = next((card for card in cards if card.name == target.base), None)
        if base is not None and alias not in entries:
            entries[alias] = _alias_entry(alias, entries.get(target.name) or mix_entry(base, target))
    return list(entries.values())


def mix_entry(card: ModelCard, mix: ModelRef) -> ModelEntry:
    """Of a mix of a base's adapters; none is listed, as there is no end of them."""
    return _adapter_entry(card, mix.name, "")


def models_body(entries: Iterable[ModelEntry]) -> dict[str, object]:
    return {"object": "list", "data": [entry.body() for entry in entries]}


def _base_entry(card: ModelCard) -> ModelEntry:
    return ModelEntry(
        id=card.name,
        created=card.created,
        root=card.root,
        parent=None,
        max_model_len=card.max_model_len,
        default_sampling=card.default_sampling,
    )


def _adapter_entry(card: ModelCard, name: str, root: str) -> ModelEntry:
    return ModelEntry(
        id=name,
        created=card.created,
        root=root or name,
        parent=card.name,
        max_model_len=card.max_model_len,
        default_sampling=card.default_sampling,
    )


def _alias_entry(alias: str, target: ModelEntry) -> ModelEntry:
    return ModelEntry(
        id=alias,
        created=target.created,
        root=target.id,
        parent=target.id,
        max_model_len=target.max_model_len,
        default_sampling=target.default_sampling,
    )
