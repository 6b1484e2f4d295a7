"""The answer to GET /v1/dialects: what each dialect makes of every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import assert_never

from serve_app.api.chat import CHAT_DEFAULTS, CHAT_PARAMETERS
from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects.dialect import Dialect
from serve_app.api.dialects.tables import DIALECTS, HEADER
from serve_app.api.dispositions import Carried, Disposition, Inert, NotYet, Renamed
from serve_app.api.forms.form import Terms
from serve_app.api.groups.conversed import Conversed
from serve_app.api.limits import DEFAULT_LIMITS, WireLimits
from serve_app.api.parameters import PARAMETERS

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
