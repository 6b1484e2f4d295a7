"""Answers of the routes that tell: of dialects, models, one moment of a router, and what a request would do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Literal, assert_never

from serve_app.api.chat import CHAT_DEFAULTS, CHAT_PARAMETERS, Conversed
from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import DIALECTS, HEADER, Dialect
from serve_app.api.forms.form import Terms
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.parameters import PARAMETERS, Carried, Disposition, Inert, NotYet, Renamed, defaults_of
from serve_app.core.bounded import Count
from serve_app.core.cards import AdapterCard, EngineName, ModelCard, ReplicaCard
from serve_app.core.delta import Load
from serve_app.core.ledger import Price
from serve_app.core.names import ModelRef

NOT_MEANINGS = frozenset({"name", "defaults", "statuses"})


def dialects_body(
    *,
    default: Dialect,
    of_models: Mapping[str, str],
    cards: Iterable[ModelCard] = (),
    limits: WireLimits = DEFAULT_LIMITS,
) -> dict[str, object]:
    """Return every dialect with its effective defaults, its meanings, and the disposition of each parameter.

    default: of the service;  of_models: by base, where a model has one of its own
    cards:   of the models, which say what their engines lack
    """
    return {
        "object": "list",
        "header": HEADER,
        "default": default.name,
        "models": dict(of_models),
        "engines": {each.name: {"engine": each.engine, "lacks": list(each.capabilities.lacks)} for each in cards},
        "data": [_dialect_body(dialect, limits) for dialect in DIALECTS.values()],
    }


def effective_defaults(dialect: Dialect) -> dict[str, object]:
    """Return the value of each parameter that was not sent, in this dialect."""
    defaults = defaults_of(CompletionRequest)
    defaults["stream_options"] = CompletionRequest.model_fields["stream_options"].get_default().model_dump()
    return {name: _plain(value) for name, value in {**defaults, **dialect.defaults}.items()}


def _dialect_body(dialect: Dialect, limits: WireLimits) -> dict[str, object]:
    terms = Terms(limits=limits, dialect=dialect)
    return {
        "name": dialect.name,
        "defaults": effective_defaults(dialect),
        "meanings": {
            each.name: _plain(getattr(dialect, each.name)) for each in fields(dialect) if each.name not in NOT_MEANINGS
        },
        "statuses": dict(dialect.statuses),
        "parameters": {name: _disposition_body(each, terms) for name, each in PARAMETERS.items()},
        "chat": _chat_body(dialect, terms),
    }


def _chat_body(dialect: Dialect, terms: Terms) -> dict[str, object]:
    """Return what differs at /v1/chat/completions."""
    others = {name: dialect.defaults.get(name, value) for name, value in CHAT_DEFAULTS.items()}
    table = {name: each for name, each in CHAT_PARAMETERS.items() if each != PARAMETERS.get(name)}
    return {
        "defaults": {**defaults_of(Conversed), **others},
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
    """Return a value as JSON has it."""
    if isinstance(value, StrEnum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


OWNER = "serve_app"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


Capability = Literal["completion", "chat", "tools", "vision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One name that a client may send as `model`.

    root:   where its weights came from
    parent: the base of an adapter, the target of an alias, or the heaviest of several
    weights: of an alias that has several targets, by their addresses
    version: digest of an adapter's files, which `base:adapter@version` pins; None of anything else
    default_sampling: sampling that the model's folder recommends, for dialects that take it from there
    engine: what computes it;  lacks: what this engine cannot do for a request
    refuses: of the recordings, those that nobody may ask for, as its operator or its engine does not allow them
    capabilities: what may be sent to it: chats, tools in them, images
    """

    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = OWNER
    root: str
    parent: str | None
    max_model_len: Count | None
    version: str | None = None
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] | None = None
    engine: EngineName = "own"
    lacks: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    capabilities: tuple[Capability, ...] = ("completion",)


def list_models(cards: Iterable[ModelCard], aliases: Mapping[str, Mapping[ModelRef, float]]) -> list[ModelEntry]:
    """Return every base, each followed by its usable adapters, then the aliases whose target exists.

    aliases: their targets with weights, the heaviest first
    """
    cards = list(cards)
    entries: dict[str, ModelEntry] = {}
    for card in sorted(cards, key=lambda card: card.name):
        entries[card.name] = _entry(card, card.name, root=card.root, parent=None)
        for adapter in card.adapters:
            if adapter.is_usable:
                name = f"{card.name}:{adapter.name}"
                entries[name] = adapter_entry(card, adapter)
    for alias, targets in aliases.items():
        found = [(each, weight, card) for each, weight in targets.items() for card in cards if card.name == each.base]
        if found and alias not in entries:
            known, *others = (_target_entry(card, each, entries) for each, _, card in found)
            weights = {entry.id: weight for entry, (_, weight, _) in zip((known, *others), found, strict=True)}
            entries[alias] = replace(
                known, id=alias, root=known.id, parent=known.id, weights=weights if others else None
            )
    return list(entries.values())


def _target_entry(card: ModelCard, target: ModelRef, entries: Mapping[str, ModelEntry]) -> ModelEntry:
    """Return the entry of what an alias stands for, which may be a version or a mix that is not listed."""
    known = entries.get(target.name)
    if known is None:
        return mix_entry(card, target)
    pinned = [each for each in card.versions(target.adapter or "") if each.version == target.version]
    return (
        known if target.version in ("", known.version) or not pinned else adapter_entry(card, pinned[0], is_pinned=True)
    )


def adapter_entry(card: ModelCard, adapter: AdapterCard, *, is_pinned: bool = False) -> ModelEntry:
    """Return the entry of one adapter. is_pinned: its address names the version, too"""
    name = f"{card.name}:{adapter.name}" + (f"@{adapter.version}" if is_pinned else "")
    return replace(_entry(card, name, root=adapter.root, parent=card.name), version=adapter.version or None)


def mix_entry(card: ModelCard, mix: ModelRef) -> ModelEntry:
    """Return the entry of a mix of a base's adapters. The list has none of them, as they are without number."""
    return _entry(card, mix.name, root="", parent=card.name)


def tokenizer_body(card: ModelCard) -> dict[str, object]:
    """Return what vLLM says of a model's tokenizer; usual special tokens that it does not have are null."""
    return {
        "tokenizer_class": card.tokenizer.kind,
        "model_max_length": card.max_model_len,
        **dict.fromkeys(SPECIAL_TOKENS),
        **dict(card.tokenizer.special_tokens),
        "chat_template": card.chat_template or None,
    }


def _entry(card: ModelCard, name: str, *, root: str, parent: str | None) -> ModelEntry:
    return ModelEntry(
        id=name,
        created=card.created,
        root=root or name,
        parent=parent,
        max_model_len=card.max_model_len or None,
        default_sampling=dict(card.default_sampling),
        engine=card.engine,
        lacks=card.capabilities.lacks,
        refuses=card.records.refuses,
        capabilities=_capabilities(card),
    )


def _capabilities(card: ModelCard) -> tuple[Capability, ...]:
    """Return what may be sent to a model, as its template and its vision encoder allow; none with a head of scores."""
    if card.records.head is not None:
        return ()
    found: dict[Capability, bool] = {
        "completion": True,
        "chat": bool(card.chat_template or card.tool_template),
        "tools": bool(card.template_for(has_tools=True)) and card.tool_prompt in ("template", "prompt"),
        "vision": card.images is not None and card.images.takes_images,
    }
    return tuple(name for name, can in found.items() if can)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """One model's queue in a router.

    id:        the model's name
    sequences: of this router's requests;  places: for sequences, on all replicas
    wait_s:    how long a request that came now would wait for its first step
    """

    id: str
    sequences: Count
    places: Count
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One replica and its load, as a router heard of them last."""

    id: str
    model: str
    running: Count
    slots: Count
    waiting: Count
    blocks: Count
    blocks_used: Count
    blocks_cached: Count | None
    block_bytes: Count
    steps: Count
    step_seconds: float
    prefix_hit_tokens: Count
    preemptions: Count
    failures: Count
    completion_tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleState:
    """Replicas of a model, as Serve said at most a few seconds ago.

    wanted:   that there are to be, by the cluster file or by the policy of autoscaling
    starting: that load;  draining: that take no more requests and end with those they have
    """

    id: str
    wanted: Count
    starting: Count
    draining: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequests:
    """Requests being served, and how many may be at once."""

    open: Count
    limit: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What one router knows.

    at:       Unix seconds
    refused:  requests that admission refused, by reason
    loading:  known models without a ready replica
    asleep:   models that were scaled to zero; a first request starts a replica
    scales:   of models whose replicas Serve has told of
    """

    object: Literal["live"] = "live"
    router: str
    at: float
    requests: OpenRequests
    refused: Mapping[str, Count]
    models: Sequence[QueueState]
    loading: Sequence[str]
    asleep: Sequence[str]
    scales: Sequence[ScaleState]
    replicas: Sequence[ReplicaState]


def replica_state(card: ReplicaCard, load: Load) -> ReplicaState:
    """Return what is shown of a replica."""
    return ReplicaState(
        id=card.replica_id,
        model=card.model.name,
        running=load.num_running,
        slots=card.model.max_num_sequences,
        waiting=load.num_waiting,
        blocks=load.num_blocks,
        blocks_used=load.num_blocks - load.num_free_blocks,
        blocks_cached=load.num_cached_blocks,
        block_bytes=load.block_bytes,
        steps=load.num_steps,
        step_seconds=round(load.step_s, 6),
        prefix_hit_tokens=load.num_prefix_hit_tokens,
        preemptions=load.num_preemptions,
        failures=load.num_failures,
        completion_tokens=load.num_generated,
    )


NANO_DIGITS = 9
"""Of costs, which are whole billionths."""
Plain = str | int | float | bool | None
NOT_TOLD = frozenset({"model", "prompt", "messages", "images", "tools"})
"""The client has them, and they are long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a prompt leaves of a model's context.

    prompt_tokens:         as it is sent; None where only a replica that computes it would know
    kept_prompt_tokens:    of these, where a prompt may be cut
    max_completion_tokens: of each completion; None where the prompt's own number is not known
    refused_because:       None where the model would not refuse it
    """

    prompt_tokens: Count | None
    kept_prompt_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    refused_because: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedAdapter:
    """One adapter that a prompt is computed with, in the version that answers."""

    name: str
    version: str
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPart(Room):
    """One prompt, by its index, for one model.

    cost_at_most: if nothing is cached and every completion is as long as may be
    price:        that the tenant pays for the model
    default_sampling: parameters that were not sent and are what the model's folder recommends
    """

    model: str
    base: str
    adapters: tuple[ExplainedAdapter, ...]
    prompt: Count
    completions: Count
    max_model_len: Count
    default_sampling: Mapping[str, float]
    cost_at_most: float
    price: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitState:
    """How one of the tenant's limits per minute stands. reset_s: until the whole limit is there again"""

    limit: Count
    remaining: int
    reset_s: float


def explanation_body(
    request: CompletionRequest,
    sent: Mapping[str, object],
    table: Mapping[str, Disposition],
    parts: Sequence[ExplainedPart],
    *,
    limits: Mapping[str, LimitState],
) -> dict[str, object]:
    """sent: the members of the body;  table: what is done with each, of this kind of body"""
    return {
        "object": "explanation",
        "dialect": request.dialect.name,
        "stream": request.stream,
        "choices": request.num_returned * request.num_parts,
        "ignored_parameters": list(request.ignored_parameters),
        "parameters": parameters_of(request, sent, table, [each.default_sampling for each in parts]),
        "parts": [asdict(each) for each in parts],
        "cost_at_most": round(sum(each.cost_at_most for each in parts), NANO_DIGITS),
        "limits": {name: asdict(each) for name, each in limits.items()},
    }


def parameters_of(
    request: CompletionRequest,
    sent: Mapping[str, object],
    table: Mapping[str, Disposition],
    of_models: Sequence[Mapping[str, float]] = (),
) -> dict[str, object]:
    """Each parameter that is a plain value, and where that is from: the body, the model, the dialect, or everybody's
    default. Where models differ, the value is the first one's.

    of_models: what comes from the model, of each part
    """
    dispositions = {name: table.get(name) for name, value in sent.items() if value is not None}
    names = {each.to if isinstance(each, Renamed) else name for name, each in dispositions.items()}
    found: dict[str, object] = {}
    for name in sorted(table.keys() & type(request).model_fields.keys() - NOT_TOLD):
        value = getattr(request, name)
        recommended = next((each[name] for each in of_models if name in each), None)
        if recommended is not None:
            found[name] = {"value": recommended, "from": "model"}
            continue
        shown = list(value) if isinstance(value, tuple) else value
        if all(isinstance(each, Plain) for each in (shown if isinstance(shown, list) else [shown])):
            origin = "dialect" if name in request.dialect.defaults else "default"
            found[name] = {"value": shown, "from": "body" if name in names else origin}
    return found
