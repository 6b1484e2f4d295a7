"""JSON schemas of the request's parameters, from the table of parameters and the model that checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, assert_never

from serve_app.api.bounds import Bounds, bounds_of
from serve_app.api.completion import CompletionRequest, StreamOptions, field_schema
from serve_app.api.dialects.dialect import UNLIMITED, Dialect
from serve_app.api.limits import INT32_MAX, MAX_TOKEN_ID, WireLimits
from serve_app.api.parameters import PARAMETERS, Accepted, Carried, Disposition, NotYet, Renamed
from serve_app.api.parse import REQUIRED
from serve_app.api.values import SAMPLER_NAMES
from serve_app.api.wording import in_words

Schema = dict[str, Any]
UNKNOWN_NAMES = (
    "A name that is none of these is ignored and told in the header X-Ignored-Parameters, unless it looks like a"
    " misspelled one. The dialects openai and fireworks refuse it."
)
BOUNDED: Mapping[str, str] = MappingProxyType({"integer": "maximum", "string": "maxLength"})
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}


def completion_schema(limits: WireLimits, dialect: Dialect) -> Schema:
    """The body of POST /v1/completions in one dialect."""
    return {
        "type": "object",
        "required": list(REQUIRED),
        "additionalProperties": not dialect.refuses_unknown,
        "description": UNKNOWN_NAMES,
        "properties": {name: _property(name, each, limits, dialect) for name, each in PARAMETERS.items()},
    }


def _property(name: str, disposition: Disposition, limits: WireLimits, dialect: Dialect) -> Schema:
    match disposition:
        case Carried():
            described = f"Must be {in_words(name, disposition, limits, dialect)}."
            return {**_value_schema(name, limits, dialect), "description": described}
        case Renamed():
            target = PARAMETERS[disposition.to]
            return {
                **_property(disposition.to, target, limits, dialect),
                "description": f"Another name of `{disposition.to}`. {disposition.besides}".rstrip(),
            }
        case Accepted():
            return {**_value_schema(name, limits, dialect), "description": f"Has no effect: {disposition.why}."}
        case NotYet():
            return {"enum": [*disposition.neutral, None], "description": "Not carried out by this server."}
        case _:
            assert_never(disposition)


def _value_schema(name: str, limits: WireLimits, dialect: Dialect) -> Schema:
    """What a client may send; null is the default everywhere but in what is required."""
    bounds = bounds_of(limits, dialect)
    if name == "max_tokens":
        schema = _max_tokens(dialect)
    else:
        schema = FORMS[name](limits, bounds) if name in FORMS else dict(field_schema(name))
    bound = bounds.of(name)
    if bound is not None and schema.get("type") in BOUNDED:
        schema[BOUNDED[schema["type"]]] = bound
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
    if isinstance(value, StreamOptions) or (value == UNLIMITED and _is_refused_unlimited(name, dialect)):
        return None  # means the same, and may be sent
    return list(value) if isinstance(value, tuple) else value


def _is_refused_unlimited(name: str, dialect: Dialect) -> bool:
    return name == "max_tokens" and not dialect.takes_unlimited_tokens


def _max_tokens(dialect: Dialect) -> Schema:
    count: Schema = {"type": "integer", "minimum": 0 if dialect.takes_zero_tokens else 1, "maximum": INT32_MAX}
    return {"anyOf": [count, {"const": UNLIMITED}, {"type": "null"}]} if dialect.takes_unlimited_tokens else count


def _strings(limits: WireLimits, max_strings: int) -> Schema:
    one = {"type": "string", "maxLength": limits.max_stop_chars}
    return {"anyOf": [one, {"type": "array", "items": one, "maxItems": max_strings}, {"type": "null"}]}


def _prompt(limits: WireLimits, bounds: Bounds) -> Schema:
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


def _lora_path(limits: WireLimits, bounds: Bounds) -> Schema:
    name = {"type": "string", "minLength": 1}
    names = {"type": "array", "items": {"anyOf": [name, {"type": "null"}]}, "maxItems": limits.max_prompts}
    return {"anyOf": [name, names, {"type": "null"}]}


def _lora(limits: WireLimits, bounds: Bounds) -> Schema:
    element = {
        "type": "object",
        "properties": {"id": TOKEN_ID, "scale": {"enum": [0, 1]}},
        "required": ["id", "scale"],
        "additionalProperties": False,
    }
    return {"anyOf": [{"type": "array", "items": element, "maxItems": limits.max_n}, {"type": "null"}]}


def _logit_bias(limits: WireLimits, bounds: Bounds) -> Schema:
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


def _logprobs(limits: WireLimits, bounds: Bounds) -> Schema:
    count = {"type": "integer", "minimum": 0, "maximum": bounds.logprobs}
    return {"anyOf": [count, {"type": "boolean"}, {"type": "null"}]}


FORMS: Mapping[str, Callable[[WireLimits, Bounds], Schema]] = MappingProxyType(
    {
        "prompt": _prompt,
        "best_of": lambda limits, bounds: {"type": "integer", "minimum": 1, "maximum": bounds.best_of},
        "lora_path": _lora_path,
        "lora": _lora,
        "stop": lambda limits, bounds: _strings(limits, bounds.stop),
        "stop_regex": lambda limits, bounds: _strings(limits, limits.max_stop_strings),
        "stop_token_ids": lambda limits, bounds: {
            "type": "array",
            "items": TOKEN_ID,
            "maxItems": limits.max_stop_token_ids,
        },
        "dry_sequence_breakers": lambda limits, bounds: {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": limits.max_stop_chars},
            "minItems": 1,
            "maxItems": limits.max_stop_strings,
        },
        "logit_bias": _logit_bias,
        "samplers": lambda limits, bounds: {
            "type": "array",
            "items": {"enum": list(SAMPLER_NAMES)},
            "uniqueItems": True,
        },
        "logprobs": _logprobs,
        "top_logprobs": lambda limits, bounds: {"type": "integer", "minimum": 0, "maximum": bounds.top_logprobs},
        "stream_options": lambda limits, bounds: {
            "type": "object",
            "properties": {
                name: {"anyOf": [{"type": "boolean"}, {"type": "null"}]} for name in StreamOptions.model_fields
            },
        },
    }
)
