"""The parts of JSON schemas, of what is read and of what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}
NOTHING: Schema = {"type": "null"}


def either(*forms: Schema) -> Schema:
    return {"anyOf": list(forms)}


def nullable(*forms: Schema) -> Schema:
    return either(*forms, NOTHING)


def string(*, least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of a string of so many characters."""
    low = {"minLength": least} if least else {}
    return {**STRING, **low} if most is None else {**STRING, **low, "maxLength": most}


def array(items: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of a list of so many elements."""
    ends = {**({"minItems": least} if least else {}), **({} if most is None else {"maxItems": most})}
    return {"type": "array", "items": items, **ends}


def record(
    members: Mapping[str, Schema] | None = None,
    *,
    optional: Mapping[str, Schema] | None = None,
    is_closed: bool = False,
) -> Schema:
    """Return the schema of an object. is_closed: whether it has no other members"""
    return {
        **OBJECT,
        "properties": {**(members or {}), **(optional or {})},
        **({"required": list(members)} if members else {}),
        **({"additionalProperties": False} if is_closed else {}),
    }


def tagged(kind: str, members: Mapping[str, Schema] | None = None, **optional: Schema) -> Schema:
    """Return the schema of an object whose `type` is this word, with further members."""
    return record({"type": {"const": kind}, **(members or {})}, optional=optional)


def mapping(values: Schema) -> Schema:
    """Return the schema of an object of any members with such values."""
    return {**OBJECT, "additionalProperties": values}


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
