"""Says in words what a parameter's value must be, with the bounds of configuration and dialect in their places."""

from __future__ import annotations

from typing import Any

from serve_app.api.bounds import bounds_of
from serve_app.api.completion import field_schema
from serve_app.api.dialects.dialect import Dialect
from serve_app.api.limits import INT32_MAX, WireLimits
from serve_app.api.parameters import Accepted, Carried
from serve_app.api.values import SAMPLERS


def in_words(name: str, disposition: Carried | Accepted, limits: WireLimits, dialect: Dialect) -> str:
    """What stands in the table, or where nothing does, what the parameter's own field takes."""
    allowed = disposition.allowed or words_of(field_schema(name)) + disposition.besides
    return allowed.format(
        limits=limits, bounds=bounds_of(limits, dialect), dialect=dialect, samplers=", ".join(SAMPLERS)
    )


def words_of(schema: dict[str, Any]) -> str:
    """A JSON schema of one value in words: its type, its values or its range."""
    if "anyOf" in schema:
        (schema,) = [each for each in schema["anyOf"] if each != {"type": "null"}]
    if "enum" in schema:
        return " or ".join(f'"{value}"' for value in schema["enum"])
    match schema["type"]:
        case "integer":
            return "an integer" + _range(schema)
        case "number":
            return "a number" + _range(schema)
        case kind:
            return f"a {kind}"


def _range(schema: dict[str, Any]) -> str:
    low, above, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if high is None or high >= INT32_MAX:
        return f" above {above:g}" if above is not None else f" of at least {low:g}" if low is not None else ""
    if above is not None:
        return f" above {above:g} and at most {high:g}"
    return f" from {low:g} to {high:g}" if low is not None else f" of at most {high:g}"
