"""Draws JSON schemas with hypothesis-jsonschema from a schema of schemas, and keeps them in drawn.json beside it.

The tests read that file and need no such package, which does not work with the newest of hypothesis:

    pip install hypothesis-jsonschema 'hypothesis<6.130'          # in an environment of its own
    python -m tests.constraints.drawn --schemas 400 --seed 1
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("drawn.json")
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri", "no-format"]
COUNT = {"type": "integer", "minimum": 0, "maximum": 3}
MORE = {"type": "integer", "minimum": 3, "maximum": 9}
NUMBER = {"enum": [-1000, -7.5, -1, 0, 0.25, 1, 3, 12.125, 99, 4096, 2**53]}
STEP = {"enum": [1, 2, 3, 7, 10, 0.5, 0.25, 0.1]}
VALUE: dict[str, Any] = {
    "anyOf": [
        {
            "enum": [
                None,
                True,
                False,
                0,
                -1,
                2.5,
                "",
                "a",
                'q"\\',
                "é\u2028",
                "\t",
                [],
                {},
                [1, [None]],
                {"a": {"b": 2}},
            ]
        },
        {"type": "string", "maxLength": 6},
        {"type": "integer", "minimum": -(10**6), "maximum": 10**6},
    ]
}
NAME = {"type": "string", "pattern": r"^[a-z \"\\/~.$é-]{1,4}$"}
PATTERN = {"enum": ["^a", "b$", "^[a-f]{2,3}$", r"\d", r"^\w+-\w+$", "^(on|off)$", ".", "^.{2}$", r"^[^\s]*$"]}
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


def _object(needed: list[str], /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def _leaf() -> dict[str, Any]:
    bounds = {"minimum": NUMBER, "maximum": NUMBER, "exclusiveMinimum": NUMBER, "exclusiveMaximum": NUMBER}
    return {
        "anyOf": [
            _object(["type"], type={"const": "string"}, minLength=COUNT, maxLength=MORE, pattern=PATTERN),
            _object(["type", "format"], type={"const": "string"}, format={"enum": FORMATS}),
            _object(["type"], type={"enum": ["integer", "number"]}, multipleOf=STEP, **bounds),
            _object(["enum"], enum={"type": "array", "items": VALUE, "minItems": 1, "maxItems": 4}),
            _object(["const"], const=VALUE),
            _object(["type"], type={"enum": ["null", "boolean"]}),
            _object(["type"], type={"type": "array", "items": {"enum": TYPES}, "minItems": 1, "uniqueItems": True}),
            {"type": "boolean"},
        ]
    }


def _schema(depth: int) -> dict[str, Any]:
    """Of all schemas so deep, as a schema."""
    if not depth:
        return _leaf()
    inner = _schema(depth - 1)
    several = {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}
    named = {"type": "object", "propertyNames": NAME, "additionalProperties": inner, "maxProperties": 3}
    return {
        "anyOf": [
            _object(
                ["type", "properties"],
                type={"const": "object"},
                properties=named,
                required={"type": "array", "items": NAME, "maxItems": 2, "uniqueItems": True},
                additionalProperties=inner,
                minProperties=COUNT,
                maxProperties=MORE,
            ),
            _object(
                ["type", "items"],
                type={"const": "array"},
                items=inner,
                prefixItems=several,
                minItems=COUNT,
                maxItems=MORE,
                uniqueItems={"const": False},
            ),
            _object(["anyOf"], anyOf=several),
            _object(["allOf"], allOf={**several, "maxItems": 2}),
            _object(["oneOf"], oneOf=several, title=NAME),
            _object(["patternProperties"], patternProperties={**named, "propertyNames": PATTERN, "maxProperties": 1}),
            _object(["not"], **{"not": inner}),
            inner,
        ]
    }


def draw(num_schemas: int, seed: int) -> list[dict[str, Any]]:
    """So many that differ."""
    import hypothesis
    from hypothesis_jsonschema import from_schema  # type: ignore[import-not-found]

    found: dict[str, dict[str, Any]] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=3 * num_schemas,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(from_schema(_schema(1), allow_x00=False))
    def note(schema: Any) -> None:
        if isinstance(schema, dict) and len(found) < num_schemas:
            found.setdefault(json.dumps(schema, sort_keys=True), schema)

    note()
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    lines = (json.dumps(schema, ensure_ascii=False) for schema in draw(options.schemas, options.seed))
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
