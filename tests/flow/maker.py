"""Makes values of JSON schemas, and now and then one that is none."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

ODD = (
    None, True, False, 0, -1, 1, 2**31, -(2**63), 10**30, 0.0, -0.5, 1e308, 5e-324, "", "a", "\x00", "é🦊", "x" * 3000,
    [], {}, [[]], [None], [True], {"": None}, [1, "a", 2.5], {"a": {"b": [1]}},
)  # fmt: skip
TEXTS = ("", "a", "tiny", "tiny:sql", "Hello there", "\x00\n\t", "東京 🦊", "(a", "[a-z]+", "5")


class Maker:
    """Makes values of the schemas of a document.

    oddity: how often something is of no schema at all, and how often an object has a member too many
    given:  how many of an object's members are there, besides those that must be
    """

    def __init__(
        self, document: Mapping[str, Any], draw: random.Random, *, oddity: float = 0.04, given: float = 3
    ) -> None:
        self._schemas = document["components"]["schemas"]
        self._draw = draw
        self._oddity = oddity
        self._given = given

    def value(self, schema: Mapping[str, Any], *, depth: int = 0) -> object:
        draw = self._draw
        if self._oddity and (draw.random() < self._oddity or depth > 5):
            return draw.choice(ODD)
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rsplit("/", 1)[1]], depth=depth + 1)
        if "anyOf" in schema:
            return self.value(draw.choice(schema["anyOf"]), depth=depth + 1)
        if "enum" in schema or "const" in schema:
            return draw.choice(schema.get("enum", [schema.get("const")]))
        return self._of_type(schema, depth)

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> object:
        draw = self._draw
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return draw.choice(TEXTS)[: schema.get("maxLength", 100)]
            case "integer":
                low, high = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63)
                near = [draw.randint(max(low, -9), max(low, min(high, 9))) for _ in range(4)]
                beyond = [low - 1, high + 1] if self._oddity else []
                return draw.choice([low, high, *beyond, *near, *(float(each) for each in near)])
            case "number":
                low = schema.get("minimum", schema.get("exclusiveMinimum", -1e9))
                high = schema.get("maximum", 1e9)
                return draw.choice([low, high, high * 2 + 1, draw.uniform(max(low, -2), min(high, 2))])
            case "boolean":
                return draw.random() < 0.5
            case "null":
                return None
            case _:
                return draw.choice(ODD)

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[object]:
        items = schema.get("prefixItems") or [schema.get("items", {})] * self._draw.randint(0, 4)
        made = [self.value(item, depth=depth + 1) for item in items]
        if "contains" in schema and self._draw.random() < 0.8:
            made.insert(self._draw.randint(0, len(made)), self.value(schema["contains"], depth=depth + 1))
        return made

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, object]:
        properties = schema.get("properties", {})
        names = [
            name
            for name in properties
            if name in schema.get("required", ()) or self._draw.random() < self._given / len(properties)
        ]
        made = {name: self.value(properties[name], depth=depth + 1) for name in names}
        if self._draw.random() < 0.05:
            made[self._draw.choice(["extra", "", "Prompt"])] = 1
        if isinstance(schema.get("additionalProperties"), dict) and self._draw.random() < 0.7:
            made[self._draw.choice(["1", "a", "-5"])] = self.value(schema["additionalProperties"], depth=depth + 1)
        return made
