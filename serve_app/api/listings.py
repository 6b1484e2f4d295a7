"""Answers of the routes that list: dialects, models, and the replicas and queues of one moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import assert_never

from serve_app.api.chat import CHAT_DEFAULTS, CHAT_PARAMETERS, Conversed
from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import DIALECTS, HEADER, Dialect
from serve_app.api.forms.form import Schema, Terms
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.parameters import PARAMETERS, Carried, Disposition, Inert, NotYet, Renamed
from serve_app.api.schemas import COUNT, NUMBER, STRING, array, record
from serve_app.core.cards import ModelCard, ReplicaCard
from serve_app.core.delta import Load
from serve_app.core.names import ModelRef

NOT_MEANINGS = frozenset({"name", "defaults", "statuses"})
INTERNAL = frozenset(
    {
        "dialect",
        "max_tokens_name",
        "sends_max_tokens",
        "ignored_parameters",
        "max_total_tokens",
        "has_default_tool_prompt",
        "model",
        "listed",
        "prompts",
        "gap",
        "messages",
        "response_fields",
    }
)


def dialects_body(
    *, default: Dialect, of_models: Mapping[str, str], limits: WireLimits = DEFAULT_LIMITS
) -> dict[str, object]:
    """Every dialect with its effective defaults, its meanings, and the disposition of each parameter.

    default: of the service;  of_models: by base, where a model has one of its own
    """
    return {
        "object": "list",
        "header": HEADER,
        "default": default.name,
        "models": dict(of_models),
        "data": [_dialect_body(dialect, limits) for dialect in DIALECTS.values()],
    }


def effective_defaults(dialect: Dialect) -> dict[str, object]:
    """What a parameter is where it was not sent, in this dialect."""
    own = CompletionRequest.model_fields
    defaults = {name: field.get_default() for name, field in own.items() if name not in INTERNAL}
    defaults["stream_options"] = defaults["stream_options"].model_dump()
    return {name: _plain(value) for name, value in {**defaults, **dialect.defaults}.items()}


def _dialect_body(dialect: Dialect, limits: WireLimits) -> dict[str, object]:
    terms = Terms(limits=limits, dialect=dialect)
    return {
        "name": dialect.name,
        "defaults": effective_defaults(dialect),
        "meanings": {
            field.name: _plain(getattr(dialect, field.name))
            for field in fields(dialect)
            if field.name not in NOT_MEANINGS
        },
        "statuses": dict(dialect.statuses),
        "parameters": {name: _disposition_body(each, terms) for name, each in PARAMETERS.items()},
        "chat": _chat_body(dialect, terms),
    }


def _chat_body(dialect: Dialect, terms: Terms) -> dict[str, object]:
    """What is otherwise at /v1/chat/completions."""
    own = {name: field.get_default() for name, field in Conversed.model_fields.items() if name not in INTERNAL}
    others = {name: dialect.defaults.get(name, value) for name, value in CHAT_DEFAULTS.items()}
    table = {name: each for name, each in CHAT_PARAMETERS.items() if each != PARAMETERS.get(name)}
    return {
        "defaults": {**own, **others},
        "parameters": {name: _disposition_body(each, terms) for name, each in table.items()},
    }


def _disposition_body(disposition: Disposition, terms: Terms) -> dict[str, object]:
    match disposition:
        case Carried(parameter):
            return {"disposition": "carried", "allowed": parameter.form.words(terms), "about": parameter.about}
        case Renamed():
            besides = {"besides": disposition.besides} if disposition.besides else {}
            return {"disposition": "renamed", "to": disposition.to, **besides}
        case NotYet():
            return {"disposition": "refused", "neutral": list(disposition.neutral), "instead": disposition.instead}
        case Inert():
            return {"disposition": "ignored"}
        case _:
            assert_never(disposition)


def _plain(value: object) -> object:
    """A value as JSON has it."""
    if isinstance(value, StrEnum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


OWNER = "serve_app"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


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


def tokenizer_body(card: ModelCard) -> dict[str, object]:
    """What vLLM says of a model's tokenizer; of the usual special tokens those that it does not have are null."""
    return {
        "tokenizer_class": card.tokenizer.kind,
        "model_max_length": card.max_model_len,
        **dict.fromkeys(SPECIAL_TOKENS),
        **dict(card.tokenizer.special_tokens),
        "chat_template": card.chat_template or None,
    }


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


QUEUE: Schema = record({"id": STRING, "sequences": COUNT, "places": COUNT, "wait_s": NUMBER})
REPLICA: Schema = record(
    {
        "id": STRING,
        "model": STRING,
        "running": COUNT,
        "slots": COUNT,
        "waiting": COUNT,
        "blocks": COUNT,
        "blocks_used": COUNT,
        "blocks_cached": COUNT,
        "block_bytes": COUNT,
        "steps": COUNT,
        "step_seconds": NUMBER,
        "prefix_hit_tokens": COUNT,
        "preemptions": COUNT,
        "failures": COUNT,
        "completion_tokens": COUNT,
    }
)
LIVE: Schema = record(
    {
        "object": {"const": "live"},
        "router": STRING,
        "at": NUMBER,
        "requests": record({"open": COUNT, "limit": COUNT}),
        "refused": {"type": "object", "additionalProperties": COUNT},
        "models": array(QUEUE),
        "loading": array(STRING),
        "replicas": array(REPLICA),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What is inside of one model.

    sequences: of this router's requests;  places: for sequences, on all replicas
    wait_s:    how long a request that came now would wait for its first step
    """

    model: str
    sequences: int
    places: int
    wait_s: float

    def body(self) -> dict[str, object]:
        waited = round(self.wait_s, 3)
        return {"id": self.model, "sequences": self.sequences, "places": self.places, "wait_s": waited}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What one router knows.

    at:       Unix seconds
    num_open: requests being served, of so many at once
    refused:  requests refused at the door, by reason
    loading:  known models without a ready replica
    """

    router: str
    at: float
    num_open: int
    max_open: int
    refused: Mapping[str, int]
    queues: Sequence[Queue]
    loading: Sequence[str]
    replicas: Sequence[tuple[ReplicaCard, Load]]

    def body(self) -> dict[str, object]:
        return {
            "object": "live",
            "router": self.router,
            "at": round(self.at, 3),
            "requests": {"open": self.num_open, "limit": self.max_open},
            "refused": dict(self.refused),
            "models": [queue.body() for queue in self.queues],
            "loading": list(self.loading),
            "replicas": [_replica(card, load) for card, load in self.replicas],
        }


def _replica(card: ReplicaCard, load: Load) -> dict[str, object]:
    return {
        "id": card.replica_id,
        "model": card.model.name,
        "running": load.num_running,
        "slots": card.model.max_num_sequences,
        "waiting": load.num_waiting,
        "blocks": load.num_blocks,
        "blocks_used": load.num_blocks - load.num_free_blocks,
        "blocks_cached": load.num_cached_blocks,
        "block_bytes": load.block_bytes,
        "steps": load.num_steps,
        "step_seconds": round(load.step_s, 6),
        "prefix_hit_tokens": load.num_prefix_hit_tokens,
        "preemptions": load.num_preemptions,
        "failures": load.num_failures,
        "completion_tokens": load.num_generated,
    }
