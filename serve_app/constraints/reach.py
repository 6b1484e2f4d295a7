"""Refuses what nobody could write to its end: a constraint whose shortest text is longer than any answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from serve_app.constraints.gbnf import ROOT, Choice, Class, Items, Literal, Node, Reference, Repeat
from serve_app.constraints.limits import MAX_SHORTEST_CHARS
from serve_app.constraints.pointers import child
from serve_app.constraints.refusal import Refusal
from serve_app.constraints.regex_length import MOST, shortest_match


def check_length(num_chars: int, path: str = "") -> int:
    """Raises Refusal where the shortest text has so many characters and may not."""
    if num_chars > MAX_SHORTEST_CHARS:
        least = f"{num_chars}" if num_chars < MOST else f"{MOST} or more"
        raise Refusal(f"its shortest text has {least} characters, and {MAX_SHORTEST_CHARS} are allowed", path)
    return num_chars


def check_rules(rules: Mapping[str, Node], order: Sequence[str]) -> None:
    """Raises Refusal. order: names of rules, each behind those that it is made of; those that are missing there refer
    to themselves, and count for what is plain of them."""
    known: dict[str, int] = {}
    circular = [name for name in rules if name not in frozenset(order)]
    for name in (*order, *reversed(circular), *reversed(circular)):
        known[name] = _shortest(rules[name], known)
    check_length(known[ROOT])


def check_schema(schema: Any, definitions: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    """Raises Refusal, which names the part. Of a schema that is prepared.

    definitions, paths: what `$ref` leads to, and where that stood in what was sent
    """
    _Schemas(definitions, paths).shortest(schema, "#")


def _shortest(node: Node, known: Mapping[str, int]) -> int:
    match node:
        case Literal(text):
            return len(text)
        case Class():
            return 1
        case Reference(name):
            return known.get(name, 0)
        case Items(parts):
            return min(sum(_shortest(part, known) for part in parts), MOST)
        case Choice(options):
            return min(_shortest(option, known) for option in options)
        case Repeat(part, low, _):
            return min(_shortest(part, known) * low, MOST)
        case _:
            assert_never(node)


class _Schemas:
    """Every part within reach by itself, an option that need not be taken too: nobody means one that is not."""

    def __init__(self, definitions: Mapping[str, Any], paths: Mapping[str, str]) -> None:
        self._definitions = definitions
        self._paths = paths
        self._known: dict[str, int] = {}

    def shortest(self, schema: Any, path: str) -> int:
        """Characters of the shortest JSON, or fewer where that is not plain."""
        if not isinstance(schema, dict):
            return 1
        found = [1, self._of_types(schema, path)]
        if "const" in schema:
            found.append(_written(schema["const"]))
        if "enum" in schema:
            found.append(min(map(_written, schema["enum"])))
        if "$ref" in schema:
            found.append(self._referred(schema["$ref"]))
        for name, choose in (("anyOf", min), ("oneOf", min), ("allOf", max)):
            if name in schema:
                options = enumerate(schema[name])
                found.append(choose(self.shortest(each, child(path, name, at)) for at, each in options))
        return check_length(max(found), path)

    def _referred(self, reference: str) -> int:
        name = reference.rpartition("/")[2]
        if name not in self._definitions:
            return 1  # the root, within itself
        if name not in self._known:
            self._known[name] = 1  # what it is within itself
            self._known[name] = self.shortest(self._definitions[name], self._paths[name])
        return self._known[name]

    def _of_types(self, schema: dict[str, Any], path: str) -> int:
        types = schema.get("type")
        lengths = {
            "string": self._of_string(schema),
            "array": self._of_array(schema, path),
            "object": self._of_object(schema, path),
        }
        wanted = types if isinstance(types, list) else [types]
        return min(lengths.get(str(each), 1) for each in wanted)

    def _of_string(self, schema: dict[str, Any]) -> int:
        return 2 + max(int(schema.get("minLength", 0)), shortest_match(schema.get("pattern", "")))

    def _of_array(self, schema: dict[str, Any], path: str) -> int:
        least = int(schema.get("minItems", 0))
        first = [
            self.shortest(each, child(path, "prefixItems", at)) for at, each in enumerate(schema.get("prefixItems", ()))
        ]
        each = self.shortest(schema.get("items"), child(path, "items"))
        return min(2 + sum(first[:least]) + max(least - len(first), 0) * each + max(least - 1, 0), MOST)

    def _of_object(self, schema: dict[str, Any], path: str) -> int:
        names = dict.fromkeys(schema.get("required", ()))
        parts = {
            name: self.shortest(each, child(path, "properties", name))
            for name, each in schema.get("properties", {}).items()
        }
        for name, each in schema.get("patternProperties", {}).items():
            self.shortest(each, child(path, "patternProperties", name))
        self.shortest(schema.get("additionalProperties"), child(path, "additionalProperties"))
        return min(1 + sum(_written(name) + 2 + parts.get(name, 1) for name in names) + (not names), MOST)


def _written(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
