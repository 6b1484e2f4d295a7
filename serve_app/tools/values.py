"""Makes JSON of arguments that a model wrote without saying of which type they are; the tool's schema says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.core.tools import Tool
from serve_app.tools.literals import as_json

EVERY_TYPE = frozenset(("null", "boolean", "number", "string", "array", "object"))
MAX_REFERENCES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """types: that each argument may have; one that is not named may have any"""

    types: Mapping[str, frozenset[str]]

    def json_of(self, key: str, text: str) -> str:
        """The literal that stands there, where it is of a type that the argument may have; otherwise a string."""
        types = self.types.get(key, EVERY_TYPE)
        written = None if types == {"string"} else as_json(text)
        if written is None or _type_of(json.loads(written)) not in types:
            return json.dumps(text, ensure_ascii=False)
        return written


def values_of(tool: Tool) -> Values:
    """Of one function's arguments."""
    root = tool.parameters or {}
    properties = root.get("properties")
    named = properties if isinstance(properties, Mapping) else {}
    return Values(types={key: types_of(schema, root) for key, schema in named.items()})


def types_of(schema: Any, root: Mapping[str, Any], num_references: int = 0) -> frozenset[str]:
    """The types that a schema allows, integers being numbers; what cannot be told is allowed."""
    if not isinstance(schema, Mapping) or num_references > MAX_REFERENCES:
        return EVERY_TYPE
    types = EVERY_TYPE
    said = schema.get("type")
    if said is not None:
        names = said if isinstance(said, list) else [said]
        types &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    if "const" in schema:
        types &= {_type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= {_type_of(value) for value in schema["enum"]}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            parts = (types_of(part, root, num_references + 1) for part in schema[name])
            types &= frozenset[str]().union(*parts)
    if isinstance(schema.get("$ref"), str):
        types &= types_of(_target(schema["$ref"], root), root, num_references + 1)
    return types or EVERY_TYPE


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a pointer within the schema leads to; None is nothing."""
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
