"""JSON schemas of the request's parameters, from the table of parameters and the model that checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, assert_never

from pydantic import TypeAdapter

from serve_app.api.completion import CompletionRequest, StreamOptions
from serve_app.api.dialects.dialect import Dialect
from serve_app.api.limits import MAX_TOKEN_ID, WireLimits
from serve_app.api.parameters import PARAMETERS, Accepted, Carried, Disposition, NotYet, Renamed
from serve_app.api.parse import REQUIRED
from serve_app.api.values import SAMPLER_NAMES
from serve_app.api.wording import in_words

Schema = dict[str, Any]
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}


def completion_schema(limits: WireLimits, dialect: Dialect) -> Schema:
    """The body of POST /v1/completions in one dialect."""
    return {
        "type": "object",
        "required": list(REQUIRED),
        "additionalProperties": False,
        "properties": {name: _property(name, each, limits, dialect) for name, each in PARAMETERS.items()},
    }


def _property(name: str, disposition: Disposition, limits: WireLimits, dialect: Dialect) -> Schema:
    match disposition:
        case Carried():
            described = f"Must be {in_words(disposition, limits, dialect)}."
            return {**_value_schema(name, limits, dialect), "description": described}
        case Renamed():
            target = PARAMETERS[disposition.to]
            return {
                **_property(disposition.to, target, limits, dialect),
                "description": f"Another name of `{disposition.to}`.",
            }
        case Accepted():
            return {**_value_schema(name, limits, dialect), "description": f"Has no effect: {disposition.why}."}
        case NotYet():
            return {"enum": [*disposition.neutral, None], "description": "Not carried out by this server."}
        case _:
            assert_never(disposition)


def _value_schema(name: str, limits: WireLimits, dialect: Dialect) -> Schema:
    """What a client may send; null is the default everywhere but in what is required."""
    schema = FORMS[name](limits) if name in FORMS else _field_schema(name)
    schema |= _bounds(name, limits, dialect)
    if name in REQUIRED:
        return schema
    return {**schema, "default": _default(name, dialect)} if "anyOf" in schema else _nullable(schema, name, dialect)


def _nullable(schema: Schema, name: str, dialect: Dialect) -> Schema:
    return {"anyOf": [schema, {"type": "null"}], "default": _default(name, dialect)}


def _default(name: str, dialect: Dialect) -> object:
    if name in dialect.defaults:
        value = dialect.defaults[name]
    else:
        field = CompletionRequest.model_fields.get(name)
        value = None if field is None else field.get_default()
    if isinstance(value, StreamOptions):
        return value.model_dump()
    return list(value) if isinstance(value, tuple) else value


def _field_schema(name: str) -> Schema:
    """What pydantic says of the field that the parameter becomes."""
    field = CompletionRequest.model_fields[name]
    annotation: Any = field.annotation
    for constraint in field.metadata:
        annotation = Annotated[annotation, constraint]
    return TypeAdapter(annotation).json_schema()


def _bounds(name: str, limits: WireLimits, dialect: Dialect) -> Schema:
    """Bounds that configuration or dialect set."""
    match name:
        case "n":
            return {"maximum": limits.max_n}
        case "model":
            return {"maxLength": limits.max_model_chars}
        case "top_k":
            return {"maximum": dialect.max_top_k}
        case _:
            return {}


def _strings(limits: WireLimits) -> Schema:
    one = {"type": "string", "maxLength": limits.max_stop_chars}
    return {"anyOf": [one, {"type": "array", "items": one, "maxItems": limits.max_stop_strings}, {"type": "null"}]}


def _prompt(limits: WireLimits) -> Schema:
    text = {"type": "string", "minLength": 1, "maxLength": limits.max_prompt_chars}
    mixed = {
        "type": "array",
        "items": {"anyOf": [TOKEN_ID, {"type": "string"}]},
        "minItems": 1,
        "maxItems": limits.max_prompt_ids,
    }
    tagged = {
        "type": "object",
        "properties": {"prompt_string": {"anyOf": [text, mixed]}},
        "required": ["prompt_string"],
        "additionalProperties": False,
    }
    several = {
        "type": "array",
        "items": {"anyOf": [text, mixed, tagged]},
        "minItems": 1,
        "maxItems": limits.max_prompts,
    }
    return {"anyOf": [text, mixed, tagged, several]}


def _lora_path(limits: WireLimits) -> Schema:
    name = {"type": "string", "minLength": 1}
    names = {"type": "array", "items": {"anyOf": [name, {"type": "null"}]}, "maxItems": limits.max_prompts}
    return {"anyOf": [name, names, {"type": "null"}]}


def _lora(limits: WireLimits) -> Schema:
    element = {
        "type": "object",
        "properties": {"id": TOKEN_ID, "scale": {"enum": [0, 1]}},
        "required": ["id", "scale"],
        "additionalProperties": False,
    }
    return {"anyOf": [{"type": "array", "items": element, "maxItems": limits.max_n}, {"type": "null"}]}


def _logit_bias(limits: WireLimits) -> Schema:
    bias = {"anyOf": [{"type": "number"}, {"const": False}]}
    pair = {
        "type": "array",
        "prefixItems": [{"anyOf": [TOKEN_ID, {"type": "string"}]}, bias],
        "minItems": 2,
        "maxItems": 2,
    }
    return {
        "anyOf": [
            {"type": "object", "additionalProperties": bias, "maxProperties": limits.max_logit_bias},
            {"type": "array", "items": pair, "maxItems": limits.max_logit_bias},
            {"type": "null"},
        ]
    }


def _logprobs(limits: WireLimits) -> Schema:
    count = {"type": "integer", "minimum": 0, "maximum": limits.max_logprobs}
    return {"anyOf": [count, {"type": "boolean"}, {"type": "null"}]}


FORMS: Mapping[str, Callable[[WireLimits], Schema]] = MappingProxyType(
    {
        "prompt": _prompt,
        "best_of": lambda limits: {"type": "integer", "minimum": 1, "maximum": limits.max_n},
        "lora_path": _lora_path,
        "lora": _lora,
        "stop": _strings,
        "stop_regex": _strings,
        "stop_token_ids": lambda limits: {"type": "array", "items": TOKEN_ID, "maxItems": limits.max_stop_token_ids},
        "dry_sequence_breakers": lambda limits: {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": limits.max_stop_chars},
            "minItems": 1,
            "maxItems": limits.max_stop_strings,
        },
        "logit_bias": _logit_bias,
        "samplers": lambda limits: {"type": "array", "items": {"enum": list(SAMPLER_NAMES)}, "uniqueItems": True},
        "logprobs": _logprobs,
        "top_logprobs": lambda limits: {"type": "integer", "minimum": 0, "maximum": limits.max_logprobs},
        "stream_options": lambda limits: {
            "type": "object",
            "properties": {
                name: {"anyOf": [{"type": "boolean"}, {"type": "null"}]} for name in StreamOptions.model_fields
            },
            "additionalProperties": False,
        },
    }
)
