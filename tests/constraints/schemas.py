"""Makes random JSON schemas: of every type, nested, referring to each other, some with what cannot be enforced."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("name", "age", "a b", "é", "tags", 'quo"te', "x", "id")
PATTERNS = ("^[a-z]{2,4}$", "[0-9]", "^(red|green|blue)$", r"^\d{3}-\d{2}$", '^[^"]+$', "b$", "^a.c$")
FORMATS = ("date", "date-time", "time", "email", "ipv4", "uuid", "uri", "hostname", "iri", "password")
UNENFORCED = ({"not": {"type": "null"}}, {"uniqueItems": True}, {"contains": {}}, {"if": {}, "then": {"minLength": 1}})
ANNOTATIONS = (
    {"title": "T"},
    {"description": "d"},
    {"default": None},
    {"examples": [1]},
    {"$comment": "c"},
    {"deprecated": True},
)


def random_schema(seed: int) -> dict[str, Any]:
    """The same for the same seed."""
    random = Random(seed)
    schema = _schema(random, depth=3)
    schema["$defs"] = {"leaf": _leaf(random), "pair": _object(random, 1)}
    if random.random() < 0.3:
        schema |= random.choice(({"$schema": "https://json-schema.org/draft/2020-12/schema"}, {"$id": "urn:x"}))
    return schema


def _schema(random: Random, depth: int) -> dict[str, Any]:
    if depth == 0 or random.random() < 0.25:
        found = _leaf(random)
    else:
        make = random.choice((_object, _object, _object, _array, _array, _any_of, _all_of, _one_of, _reference))
        found = make(random, depth - 1)
    if random.random() < 0.15:
        found |= random.choice(ANNOTATIONS)
    if random.random() < 0.02:
        found |= random.choice(UNENFORCED)
    return found


def _leaf(random: Random) -> dict[str, Any]:
    return random.choice((_string, _string, _number, _integer, _listed, _plain))(random)


def _plain(random: Random) -> dict[str, Any]:
    return {"type": random.choice(("null", "boolean", ["string", "null"], ["integer", "boolean"]))}


def _string(random: Random) -> dict[str, Any]:
    match random.randrange(5):
        case 0:
            return {"type": "string", "pattern": random.choice(PATTERNS), "maxLength": 12}
        case 1:
            return {"type": "string", "format": random.choice(FORMATS), "maxLength": 60}
        case 2:
            return {"type": "string", "maxLength": random.randrange(12)}
        case 3:
            least = random.randrange(4)
            return {"type": "string", "minLength": least, "maxLength": least + random.randrange(6)}
        case _:
            return {"type": "string", "maxLength": 20}


def _number(random: Random) -> dict[str, Any]:
    low = random.choice((-5, 0, 0.5, 10))
    match random.randrange(4):
        case 0:
            return {"type": "number", "minimum": low, "maximum": low + random.choice((0.5, 3, 1000))}
        case 1:
            return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 2}
        case 2:
            return {"type": "number", "multipleOf": random.choice((0.5, 0.25, 3)), "minimum": 0, "maximum": 99}
        case _:
            return {"type": "number"}


def _integer(random: Random) -> dict[str, Any]:
    low = random.randrange(-30, 30)
    match random.randrange(4):
        case 0:
            return {"type": "integer", "minimum": low, "maximum": low + random.randrange(200)}
        case 1:
            return {"type": "integer", "exclusiveMinimum": low, "maximum": low + 9}
        case 2:
            return {"type": "integer", "multipleOf": random.randrange(1, 9), "minimum": -99, "maximum": 99}
        case _:
            return {"type": "integer"}


def _listed(random: Random) -> dict[str, Any]:
    values = [None, True, 1, 2.5, "red", "grün", 'a"b', [1, "x"], {"k": []}]
    if random.random() < 0.4:
        return {"const": random.choice(values)}
    return {"enum": random.sample(values, random.randrange(1, 4))}


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(NAMES, random.randrange(4))
    found: dict[str, Any] = {"type": "object", "properties": {name: _schema(random, depth) for name in names}}
    found["required"] = [name for name in names if random.random() < 0.6]
    match random.randrange(5):
        case 0 | 1:
            found["additionalProperties"] = False
        case 2:
            found["additionalProperties"] = _leaf(random)
        case 3:
            found["patternProperties"] = {"^k[0-9]$": _leaf(random)}
            found["additionalProperties"] = False
        case _:
            found["minProperties"] = random.randrange(2)
    return found


def _array(random: Random, depth: int) -> dict[str, Any]:
    least = random.randrange(3)
    found: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + random.randrange(3)}
    if random.random() < 0.3:
        found["prefixItems"] = [_schema(random, depth) for _ in range(random.randrange(1, 3))]
    found["items"] = _schema(random, depth) if random.random() < 0.9 else False
    return found


def _any_of(random: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(random, depth) for _ in range(random.randrange(1, 4))]}


def _all_of(random: Random, depth: int) -> dict[str, Any]:
    return {"allOf": [_object(random, depth), {"type": "object", "properties": {"x": {"type": "integer"}}}]}


def _one_of(random: Random, depth: int) -> dict[str, Any]:
    """Told apart by a tag, mostly."""
    if random.random() < 0.3:
        return {"oneOf": [_schema(random, depth), _schema(random, depth)]}
    options = []
    for tag in ("cat", "dog"):
        option = _object(random, depth)
        option["properties"]["kind"] = {"const": tag}
        option["required"].append("kind")
        options.append(option)
    return {"oneOf": options, "discriminator": {"propertyName": "kind"}}


def _reference(random: Random, depth: int) -> dict[str, Any]:
    return {"$ref": random.choice(("#/$defs/leaf", "#/$defs/pair"))}
