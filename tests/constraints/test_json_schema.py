"""JSON schemas: what is enforced, what is refused with keyword and path, and what common tools write."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from random import Random
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema
import pydantic
import pytest

from serve_app.constraints.json_schema import prepare_schema
from serve_app.constraints.keywords import KNOWN
from serve_app.constraints.limits import Refusal
from tests.constraints.schemas import random_schema
from tests.constraints.vocabularies import BYTES, EOS, accepts, allowed, matcher_of

CLOSING = {ord('"'), ord("}"), ord("]"), EOS}


def some_text(schema: dict[str, Any], seed: int, *, max_tokens: int = 300) -> str | None:
    """A text along random tokens, those that close something more often; None where it found no end."""
    random, matcher, found = Random(seed), matcher_of("json_schema", json.dumps(schema)), bytearray()
    for _ in range(max_tokens):
        tokens = allowed(matcher)
        closing = [token_id for token_id in tokens if token_id in CLOSING]
        token_id = random.choice(closing if closing and random.random() < 0.5 else tokens)
        if token_id == EOS:
            return found.decode()
        found += BYTES.pieces[token_id] or b""
        assert matcher.consume_token(token_id)
        if matcher.is_stopped():
            return found.decode()
    return None


def test_most_random_schemas_are_taken_and_end() -> None:
    """So that the law below is about something."""
    num_ended = 0
    for seed in range(0, 40, 4):
        with suppress(Refusal):
            num_ended += some_text(random_schema(seed), 0) is not None
    assert num_ended >= 5


@pytest.mark.parametrize("seed", range(40))
def test_every_text_that_ends_satisfies_the_schema(seed: int) -> None:
    schema = random_schema(seed)
    try:
        matcher_of("json_schema", json.dumps(schema))
    except Refusal as refusal:
        known = re.search("cannot be enforced|nsatisfiable|only supported", refusal.message)
        if known is None:
            raise
        return
    for number in range(2):
        text = some_text(schema, number)
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"properties": {"a/b": {"not": {"type": "null"}}}}, "not", "#/properties/a~1b"),
        ({"items": {"uniqueItems": True}}, "uniqueItems", "#/items"),
        ({"if": {}, "then": {"minLength": 1}}, "then", "#"),
        ({"contains": {"const": 1}}, "contains", "#"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", "#"),
        ({"allOf": [{"unevaluatedProperties": False, "$ref": "#"}]}, "unevaluatedProperties", "#/allOf/0"),
        ({"properties": {"a": {}}, "propertyNames": {"maxLength": 3}}, "propertyNames", "#"),
        ({"minProperties": 2}, "minProperties", "#"),
        ({"items": {"type": "object", "properties": {"a": {}}, "maxProperties": 3}}, "maxProperties", "#/items"),
        ({"properties": {"b": {"properties": {"a": {}}, "minProperties": 1}}}, "minProperties", "#/properties/b"),
        ({"$defs": {"x": {"pattern": "(?!a)b", "type": "string"}}, "$ref": "#/$defs/x"}, "pattern", "#/$defs/x"),
        ({"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf", "#/items"),
        ({"properties": {"a": {"$ref": "http://elsewhere/x"}}}, "$ref", "#/properties/a"),
        ({"$ref": "#/$defs/none"}, "$ref", "#"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance", "#"),
        ({"type": "text"}, "type", "#"),
        ({"required": "a"}, "required", "#"),
        ({"properties": {"a": 5}}, "a schema must be", "#/properties/a"),
        ({"minLength": -1}, "minLength", "#"),
        ({"multipleOf": 0}, "multipleOf", "#"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_keyword_and_path(schema: object, keyword: str, path: str) -> None:
    with pytest.raises(Refusal) as caught:
        matcher_of("json_schema", json.dumps(schema))
    assert caught.value.path == path
    assert keyword in caught.value.message


@pytest.mark.parametrize(
    "neutral",
    [
        {"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}, {"if": {"type": "null"}}, {"then": {}},
        {"dependencies": {}}, {"dependentSchemas": {}}, {"contains": {}, "minContains": 0}, {"not": False},
        {"propertyNames": {"type": "string"}}, {"unevaluatedProperties": {}}, {"minProperties": 0},
        {"title": 5, "description": "d", "default": {}, "examples": [], "$schema": "http://x/y", "$id": "z",
         "$comment": "c", "deprecated": True, "nullable": True, "discriminator": {}, "readOnly": True},
        {"definitions": {"unused": {"not": {"type": "null"}}}},
    ],
)  # fmt: skip
def test_what_changes_nothing_passes(neutral: dict[str, Any]) -> None:
    assert accepts("json_schema", json.dumps({"type": "array", **neutral}), "[]")


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        (True, ["1", '{"a":[]}'], ["", "{"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),  # draft 4
        ({"items": [{"type": "integer"}], "additionalItems": False, "type": "array"}, ["[1]"], ["[1,2]", '["a"]']),
        ({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "null"}},
         ['{"a":null}', "{}"], ['{"b":null}', '{"a":1}']),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"xy":1}'], ['{"y":1}']),
        ({"type": "object", "unevaluatedProperties": False, "properties": {"a": {}}}, ['{"a":1}'], ['{"b":1}']),
        ({"type": "object", "properties": {"a": {"not": {}}}}, ["{}", '{"b":1}'], ['{"a":1}']),
        ({"$id": "http://x/y", "properties": {"n": {"$ref": "#"}, "e": {"$ref": "http://x/y#/definitions/e"},
          "f": {"$ref": "#foo"}}, "definitions": {"e": {"type": "integer"}, "f": {"$anchor": "foo", "const": 0}}},
         ['{"n":{"e":1},"f":0}'], ['{"n":{"e":"a"}}', '{"f":1}']),
        ({"type": "string"}, ['"é\\n"'], ['"\\ud800"', '"\n"']),
        ({"type": "object"}, ['{"a": 1}', '{\n    "a":1\n}'], ['{  "a":1}', "{\n\n}", " {}"]),
    ],
)  # fmt: skip
def test_keywords_mean_what_the_standard_says(schema: object, accepted: list[str], refused: list[str]) -> None:
    source = json.dumps(schema)
    assert [text for text in (*accepted, *refused) if accepts("json_schema", source, text)] == accepted


def test_formats_are_enforced_or_told() -> None:
    schema = {"properties": {"a": {"format": "iri"}, "b": {"format": "date"}, "c": {"format": "iri"}}}
    assert prepare_schema(json.dumps(schema)).formats == ("iri",)
    assert accepts("json_schema", '{"type": "string", "format": "date"}', '"2024-02-29"')
    assert not accepts("json_schema", '{"type": "string", "format": "date"}', '"2024-13-01"')


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, pydantic.Field(ge=0, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    friends: list[Dog] = []


class Owner(pydantic.BaseModel):
    """Of every type that is common."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Annotated[str, pydantic.Field(min_length=1, max_length=9, description="of the owner")]
    born: date
    seen: datetime | None = None
    token: UUID
    balance: Decimal
    colour: Colour
    pair: tuple[int, str]
    counts: dict[str, int]
    by_colour: dict[Colour, float] = {}
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


OWNER = (
    '{"name":"Ann","born":"2001-02-03","seen":null,"token":"12345678-1234-1234-1234-123456789abc","balance":"-1.50",'
    '"colour":"red","pair":[1,"a"],"counts":{"x":1},"by_colour":{"red":0.5},"pet":{"kind":"dog","friends":[]}}'
)


def test_schemas_that_pydantic_writes_pass() -> None:
    source = json.dumps(Owner.model_json_schema())
    Owner.model_validate_json(OWNER)
    assert accepts("json_schema", source, OWNER)
    assert not accepts("json_schema", source, OWNER.replace('"dog"', '"cow"'))
    decimal = json.dumps({"type": "string", "pattern": next(iter(KNOWN))})  # as pydantic 2.11 writes it
    assert [text for text in ('"-1.50"', '"-."', '""', '".5"') if accepts("json_schema", decimal, text)] == [
        '"-1.50"',
        '".5"',
    ]


ZOD: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "mail": {"type": "string", "format": "email", "pattern": list(KNOWN)[1]},
        "age": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        "tags": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
        "size": {"anyOf": [{"type": "string", "const": "S"}, {"type": "string", "const": "L"}]},
        "never": {"not": {}},
        "shape": {"oneOf": [
            {"type": "object", "properties": {"t": {"type": "string", "const": "a"}}, "required": ["t"],
             "additionalProperties": False},
            {"type": "object", "properties": {"t": {"type": "string", "const": "b"}}, "required": ["t"],
             "additionalProperties": False}]},
    },
    "required": ["mail", "age"],
    "additionalProperties": False,
}  # fmt: skip


def test_schemas_that_zod_writes_pass() -> None:
    text = '{"mail":"a.b@c.de","age":7,"tags":{"x":"y"},"size":"S","shape":{"t":"b"}}'
    assert accepts("json_schema", json.dumps(ZOD), text)
    assert not accepts("json_schema", json.dumps(ZOD), text.replace("a.b@", "a..b@"))
    assert not accepts("json_schema", json.dumps(ZOD), text.replace('"b"', '"c"'))


@pytest.mark.parametrize("pattern", KNOWN)
def test_a_known_pattern_stands_for_the_same_language(pattern: str) -> None:
    random = Random(7)
    parts = ("aZ1", "0", ".", "..", "-", "+", "'", "@", "a.b@c.de", "A.B@C.DE", "P", "1Y", "T", "2H", "3W", "1M", ".5S")
    parts += (",", "7D", "P1YT2H", "12")
    found = set()
    for _ in range(20_000):
        text = "".join(random.choices(parts, k=random.randrange(6)))
        found.add(bool(re.search(pattern, text)))
        assert bool(re.search(pattern, text)) == bool(re.search(KNOWN[pattern], text)), text
    assert found == {True, False}


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, -76806442853494562278089362235230583165])
@pytest.mark.parametrize("keyword", ["enum", "const", "minimum"])
def test_an_integer_that_the_library_would_round_is_refused(keyword: str, number: int) -> None:
    value = {"enum": [1, [number]], "const": {"a": number}, "minimum": number}[keyword]
    with pytest.raises(Refusal, match=f'"{keyword}" cannot be enforced'):
        prepare_schema(json.dumps({keyword: value}))
    assert prepare_schema(json.dumps({"enum": [2**63 - 1, -(2**63)]})).schema["enum"] == [2**63 - 1, -(2**63)]
