"""JSON schemas of the bodies that ask for completions, one for each dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from serve_app.api.contradictions import excluded
from serve_app.api.dialects import UNLIMITED
from serve_app.api.forms.form import Terms
from serve_app.api.forms.schema import BOOLEAN, NOTHING, Schema, nullable
from serve_app.api.groups import StreamOptions
from serve_app.api.native import NOT_NATIVE
from serve_app.api.parameters import STREAM_OPTIONS, Carried, Disposition, Inert, NotYet, Renamed, form_of
from serve_app.api.parse import NATIVE, Body

NOT_CARRIED_OUT = "Not carried out by this server."
CHANGES_NO_ANSWER: Schema = {"description": "Changes no answer; it is told in the header X-Ignored-Parameters."}
UNKNOWN_NAMES = (
    "A name that is none of these is ignored and told in the header X-Ignored-Parameters, unless it looks like a"
    " misspelled one. The dialects openai and fireworks refuse it."
)


def body_schema(kind: Body[Any], terms: Terms) -> Schema:
    """Return the schema of one kind of body in one dialect."""
    has_default_model = (kind.default_model or terms.dialect.default_model) is not None
    properties = {name: _property(name, kind, terms) for name in kind.table}
    properties["stream_options"]["anyOf"] = [_options(terms), NOTHING]
    schema = {
        "type": "object",
        "required": list(kind.required),
        "additionalProperties": NOTHING if terms.dialect.refuses_unknown else True,
        "description": UNKNOWN_NAMES,
        "properties": properties,
        "not": {"anyOf": excluded(terms, kind.table)},
    }
    return with_optional_model(schema) if has_default_model else schema


def native_schema(terms: Terms) -> Schema:
    """Return the schema of llama.cpp's own routes, which need no model if one is served, and rank nothing."""
    schema = with_optional_model(body_schema(NATIVE, terms))
    for name in NOT_NATIVE:
        neutral = {"enum": [False, None]} if name.startswith("return_") else NOTHING
        schema["properties"][name] = {**neutral, "description": "Carried out at /v1/completions only."}
    return schema


def with_optional_model(schema: Schema) -> Schema:
    """Return the same schema with an optional `model`."""
    model = dict(schema["properties"]["model"])
    about = {"description": model.pop("description")}
    properties = {**schema["properties"], "model": {**nullable(model), **about}}
    return {**schema, "required": [name for name in schema["required"] if name != "model"], "properties": properties}


def _options(terms: Terms) -> Schema:
    """Return the schema of `stream_options`."""
    return {
        "type": "object",
        "properties": {name: _option(each) for name, each in STREAM_OPTIONS.items()},
        "additionalProperties": NOTHING if terms.dialect.refuses_unknown else True,
    }


def _option(disposition: Disposition) -> Schema:
    if isinstance(disposition, Inert):
        return CHANGES_NO_ANSWER
    assert isinstance(disposition, Carried)
    return {**nullable(BOOLEAN), "description": disposition.parameter.about}


def _property(name: str, kind: Body[Any], terms: Terms) -> Schema:
    match kind.table[name]:
        case Carried(parameter):
            described = f"{parameter.about} Must be {parameter.form.words(terms)}."
            return {**_value_schema(name, kind, terms), "description": described}
        case Renamed() as disposition:
            described = f"Another name of `{disposition.to}`. {disposition.besides}".rstrip()
            return {**_renamed_schema(name, disposition, kind, terms), "description": described}
        case Inert():
            return CHANGES_NO_ANSWER
        case NotYet() as disposition:
            return {"enum": [*disposition.neutral, None], "description": f"{NOT_CARRIED_OUT} {disposition.instead}"}
        case _ as disposition:
            assert_never(disposition)


def _value_schema(name: str, kind: Body[Any], terms: Terms) -> Schema:
    """Return the schema of a parameter's own name; null means the default unless the parameter is required."""
    schema = form_of(name, kind.table).schema(terms)
    if name in kind.required:
        return schema
    return {**nullable(*_forms(schema)), "default": _default(name, kind, terms)}


def _renamed_schema(name: str, disposition: Renamed, kind: Body[Any], terms: Terms) -> Schema:
    """Return the schema of another name of a parameter."""
    values = [*_forms(form_of(name, kind.table).schema(terms)), *({"const": value} for value in disposition.absent)]
    return {**nullable(*values), "default": None if disposition.besides else _default(disposition.to, kind, terms)}


def _forms(schema: Schema) -> list[Schema]:
    return list(schema.get("anyOf") or [schema])


def _default(name: str, kind: Body[Any], terms: Terms) -> object:
    defaults = {**kind.defaults, **terms.dialect.defaults}
    if name in defaults:
        value = defaults[name]
    else:
        field = kind.request.model_fields.get(name)
        value = None if field is None or field.is_required() else field.get_default()
    is_unlimited = name == "max_tokens" and value == UNLIMITED
    if isinstance(value, StreamOptions) or (is_unlimited and not terms.dialect.takes_unlimited_tokens):
        return None  # means the same, and may be sent
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
