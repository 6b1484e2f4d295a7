"""JSON schemas of the request's parameters, from their declarations."""

from __future__ import annotations

from typing import assert_never

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects.dialect import UNLIMITED
from serve_app.api.dispositions import Accepted, Carried, Disposition, NotYet, Renamed
from serve_app.api.forms.form import Schema, Terms
from serve_app.api.parameters import PARAMETERS, form_of
from serve_app.api.parse import REQUIRED
from serve_app.api.stream_options import StreamOptions

UNKNOWN_NAMES = (
    "A name that is none of these is ignored and told in the header X-Ignored-Parameters, unless it looks like a"
    " misspelled one. The dialects openai and fireworks refuse it."
)


def completion_schema(terms: Terms) -> Schema:
    """The body of POST /v1/completions in one dialect."""
    return {
        "type": "object",
        "required": list(REQUIRED),
        "additionalProperties": not terms.dialect.refuses_unknown,
        "description": UNKNOWN_NAMES,
        "properties": {name: _property(name, each, terms) for name, each in PARAMETERS.items()},
    }


def _property(name: str, disposition: Disposition, terms: Terms) -> Schema:
    match disposition:
        case Carried(parameter):
            described = f"{parameter.about} Must be {parameter.form.words(terms)}."
            return {**_value_schema(name, name, terms), "description": described}
        case Renamed():
            described = f"Another name of `{disposition.to}`. {disposition.besides}".rstrip()
            return {**_value_schema(name, disposition.to, terms), "description": described}
        case Accepted(parameter):
            return {**_value_schema(name, name, terms), "description": f"Has no effect. {parameter.about}"}
        case NotYet():
            return {"enum": [*disposition.neutral, None], "description": "Not carried out by this server."}
        case _:
            assert_never(disposition)


def _value_schema(name: str, canonical: str, terms: Terms) -> Schema:
    """What may be sent under a name; null is the default everywhere but in what is required."""
    schema = form_of(name).schema(terms)
    if canonical in REQUIRED:
        return schema
    null: Schema = {"type": "null"}
    forms = [*schema["anyOf"], null] if "anyOf" in schema else [schema, null]
    return {"anyOf": forms, "default": _default(canonical, terms)}


def _default(name: str, terms: Terms) -> object:
    if name in terms.dialect.defaults:
        value = terms.dialect.defaults[name]
    else:
        field = CompletionRequest.model_fields.get(name)
        value = None if field is None else field.get_default()
    is_unlimited = name == "max_tokens" and value == UNLIMITED
    if isinstance(value, StreamOptions) or (is_unlimited and not terms.dialect.takes_unlimited_tokens):
        return None  # means the same, and may be sent
    return list(value) if isinstance(value, tuple) else value
