"""Tells whether no value fits two schemas, where that is plain to see; then `oneOf` of them is `anyOf`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Resolve = Callable[[Any], Any]
"""From a schema to the one that its `$ref` leads to; another stays."""

MAX_DEPTH = 4
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))


def are_disjoint(left: Any, right: Any, resolve: Resolve, *, depth: int = MAX_DEPTH) -> bool:
    """True where it is certain: by type, by their values, or by a property that both require, as a discriminator is."""
    left, right = resolve(left), resolve(right)
    if left is False or right is False:
        return True
    if not (depth and isinstance(left, dict) and isinstance(right, dict)):
        return False
    values, others = _values(left), _values(right)
    if values is not None and others is not None:
        return not values & others
    if not _types(left) & _types(right):
        return True
    if _types(left) != {"object"} or _types(right) != {"object"}:
        return False
    required = set(left.get("required") or ()) & set(right.get("required") or ())
    return any(
        are_disjoint(left["properties"][name], right["properties"][name], resolve, depth=depth - 1)
        for name in required & _properties(left) & _properties(right)
    )


def tag_of(options: Sequence[Any], resolve: Resolve) -> str | None:
    """A property that tells all options apart wherever it is there, as a discriminator with a default is."""
    resolved = [resolve(option) for option in options]
    if not all(isinstance(option, dict) and _types(option) == {"object"} for option in resolved):
        return None
    common = set.intersection(*(_properties(option) for option in resolved))
    for name in sorted(common):
        values = [option["properties"][name] for option in resolved]
        if all(are_disjoint(left, right, resolve, depth=1) for at, left in enumerate(values) for right in values[:at]):
            return name
    return None


def _values(schema: dict[str, Any]) -> set[str] | None:
    """As JSON, whose text tells true from 1; None where they are not listed."""
    if "const" in schema:
        return {_text(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {_text(value) for value in schema["enum"]}
    return None


def _text(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True)


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Those that may fit; an integer is a number."""
    found = schema.get("type")
    if found is None:
        values = _values(schema)
        return TYPES if values is None else frozenset(t for text in values for t in _types_of(json.loads(text)))
    types = frozenset(found if isinstance(found, list) else (found,))
    return types | {"integer"} if "number" in types else types


def _types_of(value: Any) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int() | float():
            return ("number", "integer")
        case str():
            return ("string",)
        case list():
            return ("array",)
        case _:
            return ("object",)


def _properties(schema: dict[str, Any]) -> set[str]:
    found = schema.get("properties")
    return set(found) if isinstance(found, dict) else set()
