"""Prepares a JSON schema for the library's compiler: refuses, by keyword and path, what cannot be enforced.

What comes out has the same meaning, or is stricter, and has only keywords that the library enforces. The library itself
ignores some keywords in silence and names no path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.constraints.keywords import (
    COUNTS,
    FORMATS,
    KNOWN,
    ROOT,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    SHAPES,
    TYPE_NAMES,
    References,
    check_enforced,
    check_shape,
    unenforced,
)
from serve_app.constraints.limits import Refusal, check_schema, child

WHITESPACE = r"( |\r?\n[ \t]{0,20})"
"""Between two parts of JSON: a space, or a new line and its indent. A model that is unsure cannot write it for ever."""

SAYING_NOTHING = frozenset(("type", "title", "description", "default", "examples", "$comment", "deprecated"))
"""Of a name, which is a string in any case."""

Schema = Any  # a JSON object, or a boolean


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSchema:
    """A JSON schema prepared for the constraint library.

    formats: formats in the schema that are not enforced
    patterns, one_ofs, counted: what is left in it of these, by path; the library may refuse them without saying where.
                                `counted` are objects with bounds on how many members they have
    """

    schema: dict[str, Any]
    formats: tuple[str, ...]
    patterns: dict[str, str]
    one_ofs: dict[str, dict[str, Any]]
    counted: dict[str, dict[str, Any]]


def prepare_schema(source: str, *, whitespace: str | None = WHITESPACE) -> PreparedSchema:
    """Prepare a schema. Raises Refusal, which says where.

    whitespace: what may stand between two parts of JSON, as an expression; None is nothing at all
    """
    try:
        return _Preparation(json.loads(source)).prepared(whitespace)
    except RecursionError:
        raise Refusal("the schema is nested too deeply") from None


class _Preparation:
    """Walks all that the root leads to. What is referred to moves to `$defs`, under a name of our own."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._references = References(root)
        self._defined: dict[str, str] = {ROOT: ROOT}
        self._formats: dict[str, None] = {}
        self._patterns: dict[str, str] = {}
        self._one_ofs: dict[str, dict[str, Any]] = {}
        self._counted: dict[str, dict[str, Any]] = {}

    def prepared(self, whitespace: str | None) -> PreparedSchema:
        root = self._schema(self._root, ROOT)
        if root is False:
            raise Refusal("the schema is false, which nothing satisfies")
        schema = {} if root is True else root
        definitions: dict[str, Schema] = {}
        while len(definitions) + 1 < len(self._defined):
            target, name = list(self._defined.items())[len(definitions) + 1]
            definitions[name.rpartition("/")[2]] = self._schema(self._references.at(target, target), target)
        check_schema(schema, definitions, {name.rpartition("/")[2]: target for target, name in self._defined.items()})
        if definitions:
            schema = {**schema, "$defs": definitions}
        options = {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
        return PreparedSchema(
            schema={**schema, "x-guidance": options},
            formats=tuple(self._formats),
            patterns=self._patterns,
            counted=self._counted,
            one_ofs={path: {**one_of, "$defs": definitions} for path, one_of in self._one_ofs.items()},
        )

    def _schema(self, schema: Schema, path: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Refusal("a schema must be an object or a boolean", path)
        check_enforced(schema, path)
        if "not" in schema:
            if schema["not"] in (True, {}):
                return False
            if schema["not"] is not False:
                raise unenforced("not", path)
        found = self._plain(schema, path)
        self._add_reference(schema, path, found)
        for name in SCHEMA_MAPS:
            if name in schema:
                found[name] = self._map(schema[name], path, name)
        for name in SCHEMA_LISTS:
            if name in schema:
                found[name] = self._list(schema[name], path, name)
        self._add_items(schema, path, found)
        self._add_properties(schema, path, found)
        self._settle_one_of(path, found)
        self._note_counted(path, found)
        return found

    def _plain(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the keywords that hold no schemas."""
        found: dict[str, Any] = {}
        for name, value in _without_old_bounds(schema).items():
            if name in SHAPES:
                check_shape(name, value, path)
                found[name] = int(value) if name in COUNTS else value  # 2.0 is one, too
        if found.get("format") is not None and found["format"] not in FORMATS:
            self._formats[found.pop("format")] = None
        if "pattern" in found:
            found["pattern"] = self._patterns[path] = KNOWN.get(found["pattern"], found["pattern"])
        if schema.get("uniqueItems") is True and found.get("maxItems", 2) > 1:
            raise unenforced("uniqueItems", path)
        least = found.get("minProperties", 0)
        if least <= len(set(found.get("required", ()))):
            found.pop("minProperties", None)
        elif least > 1:  # the library counts a name that comes twice as two
            raise unenforced("minProperties", path, ' above 1 and above the number of "required" names')
        return found

    def _add_reference(self, schema: dict[str, Any], path: str, found: dict[str, Any]) -> None:
        reference = schema.get("$ref", schema.get("$recursiveRef"))
        if reference is None:
            return
        target = self._references.path_of(reference, path)
        self._references.at(target, path)
        found["$ref"] = self._defined.setdefault(target, f"#/$defs/serve_app.{len(self._defined)}")

    def _map(self, value: Any, path: str, name: str) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise Refusal(f'"{name}" must be an object of schemas', path)
        if name == "patternProperties":
            self._patterns.update({child(path, name, pattern): pattern for pattern in value})
        return {key: self._schema(each, child(path, name, key)) for key, each in value.items()}

    def _list(self, value: Any, path: str, name: str) -> list[Schema]:
        if not isinstance(value, list) or (not value and name != "prefixItems"):
            raise Refusal(f'"{name}" must be a list of schemas', path)
        return [self._schema(each, child(path, name, at)) for at, each in enumerate(value)]

    def _add_items(self, schema: dict[str, Any], path: str, found: dict[str, Any]) -> None:
        """Add `items`. Older drafts call `prefixItems` `items`, and what follows them `additionalItems`."""
        items = schema.get("items")
        if isinstance(items, list):
            found["prefixItems"] = self._list(items, path, "items") if items else []
            items, name = schema.get("additionalItems"), "additionalItems"
        else:
            name = "items"
        if items is not None:
            found["items"] = self._schema(items, child(path, name))

    def _add_properties(self, schema: dict[str, Any], path: str, found: dict[str, Any]) -> None:
        """Add what other names may have, and which names are allowed."""
        others = schema.get("additionalProperties")
        if others is not None:
            found["additionalProperties"] = self._schema(others, child(path, "additionalProperties"))
        unevaluated = schema.get("unevaluatedProperties", True)
        if unevaluated is not True and unevaluated != {}:
            if unevaluated is not False or others is not None or found.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
                raise unenforced("unevaluatedProperties", path)
            found["additionalProperties"] = False
        names = schema.get("propertyNames", True)
        if names is not True and not (isinstance(names, dict) and names.keys() <= SAYING_NOTHING):
            self._restrict_names(names, path, found)

    def _restrict_names(self, names: Any, path: str, found: dict[str, Any]) -> None:
        """Allow only a few names, or those of a pattern, if nothing else says which there are."""
        others = found.pop("additionalProperties", True)
        names = self._resolved(names)
        saying = (
            {key: value for key, value in names.items() if key not in SAYING_NOTHING} if isinstance(names, dict) else {}
        )
        match saying:
            case _ if found.keys() & {"properties", "patternProperties"}:
                raise unenforced("propertyNames", path, ' beside "properties"')
            case {"enum": [*allowed]} if len(saying) == 1 and all(isinstance(each, str) for each in allowed):
                found["properties"] = dict.fromkeys(allowed, others)
            case {"const": str(allowed)} if len(saying) == 1:
                found["properties"] = {allowed: others}
            case {"pattern": str(pattern)} if len(saying) == 1:
                pattern = self._patterns[child(path, "propertyNames")] = KNOWN.get(pattern, pattern)
                found["patternProperties"] = {pattern: others}
            case _:
                raise unenforced("propertyNames", path)
        found["additionalProperties"] = False

    def _settle_one_of(self, path: str, found: dict[str, Any]) -> None:
        """Turn `oneOf` into `anyOf` if its options exclude each other, or if a tag tells them apart that is then
        required.
        """
        options = found.get("oneOf")
        if options is None:
            return
        pairs = ((left, right) for at, left in enumerate(options) for right in options[:at])
        if not all(are_disjoint(left, right, self._resolved) for left, right in pairs):
            tag = tag_of(options, self._resolved)
            if tag is None:
                self._one_ofs[path] = {"oneOf": options}
                return
            options = [{"allOf": [option, {"type": "object", "required": [tag]}]} for option in options]
        del found["oneOf"]
        if "anyOf" in found:
            found["allOf"] = [*found.get("allOf", ()), {"anyOf": options}]
        else:
            found["anyOf"] = options

    def _note_counted(self, path: str, found: dict[str, Any]) -> None:
        if not found.keys() & {"minProperties", "maxProperties"}:
            return
        names = ("minProperties", "maxProperties", "required")
        bounds = {name: found[name] for name in names if name in found}
        if found.get("additionalProperties") is False:
            bounds["additionalProperties"] = False
        self._counted[path] = {
            "type": "object",
            "properties": dict.fromkeys(found.get("properties", ()), True),
            **bounds,
        }

    def _resolved(self, schema: Schema) -> Schema:
        """Return what one of our own names leads to, as it was sent."""
        for _ in range(8):
            if not (isinstance(schema, dict) and "$ref" in schema):
                return schema
            targets = {name: target for target, name in self._defined.items()}
            target = targets.get(schema["$ref"]) or self._references.path_of(schema["$ref"], ROOT)
            schema = self._references.at(target, ROOT)
        return schema


def _without_old_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with exclusive bounds as numbers; draft 4 writes them as booleans."""
    found = dict(schema)
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        is_exclusive = found.get(exclusive)
        if isinstance(is_exclusive, bool):
            del found[exclusive]
            if is_exclusive and inclusive in found:
                found[exclusive] = found.pop(inclusive)
    return found


Resolve = Callable[[Any], Any]
"""From a schema to the one that its `$ref` leads to; another stays."""

MAX_DEPTH = 4
TYPES_OF: Mapping[type, tuple[str, ...]] = {
    type(None): ("null",), bool: ("boolean",), int: ("number", "integer"), float: ("number", "integer"),
    str: ("string",), list: ("array",),
}  # fmt: skip


def are_disjoint(left: Any, right: Any, resolve: Resolve, *, depth: int = MAX_DEPTH) -> bool:
    """Return True if certainly no value fits both schemas: by type, by values, or by a property that both require."""
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
    """Return a property that tells all options apart if it is there, such as a discriminator with a default."""
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
    """Return the allowed values as JSON, which tells true from 1; None if they are not listed."""
    if "const" in schema:
        return {_text(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {_text(value) for value in schema["enum"]}
    return None


def _text(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True)


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that may fit; an integer is a number."""
    found = schema.get("type")
    if found is None:
        values = _values(schema)
        return (
            TYPE_NAMES
            if values is None
            else frozenset(each for text in values for each in TYPES_OF.get(type(json.loads(text)), ("object",)))
        )
    types = frozenset(found if isinstance(found, list) else (found,))
    return types | {"integer"} if "number" in types else types


def _properties(schema: dict[str, Any]) -> set[str]:
    found = schema.get("properties")
    return set(found) if isinstance(found, dict) else set()
