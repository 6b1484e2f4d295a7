"""What a constraint is read as: its kind and source, whatever it was spelled like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.core.errors import InvalidRequest
from serve_app.core.request import Constraint
from tests.parsing import parse_completion


def constraint_of(**parameters: Any) -> Constraint | None:
    return parse_completion(json.dumps({"model": "tiny", "prompt": "Hello", **parameters}).encode()).constraint


@pytest.mark.parametrize(
    ("sent", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"response_format": {"type": "json_object", "schema": '{"b": 1, "a": 2}'}}, "json_schema", '{"b":1,"a":2}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"const": 1}}}, "json_schema", '{"const":1}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "json_schema", "{}"),
        ({"json_schema": {}}, "json_schema", "{}"),
        ({"json_schema": "true"}, "json_schema", "true"),
        ({"grammar": "root ::= 'a'"}, "gbnf", "root ::= 'a'"),
        ({"grammar": {"type": "regex", "value": ""}}, "regex", ""),
        ({"grammar": {"type": "llguidance", "value": {"grammars": []}}}, "llguidance", '{"grammars":[]}'),
        ({"ebnf": "root ::= 'a'"}, "gbnf", "root ::= 'a'"),
    ],
)  # fmt: skip
def test_a_constraint_is_its_kind_and_source(sent: dict[str, Any], kind: str, source: str) -> None:
    found = constraint_of(**sent)
    assert found == Constraint(kind=kind, source=source, name=next(iter(sent)))  # type: ignore[arg-type]


def test_a_digest_is_of_what_is_meant() -> None:
    first, same = Constraint(kind="gbnf", source="a", name="grammar"), Constraint(kind="gbnf", source="a", name="ebnf")
    assert first.digest == same.digest
    assert first.digest != Constraint(kind="regex", source="a", name="grammar").digest


@pytest.mark.parametrize("source", ["[1]", "5", '"text"', "NaN", "{", "[" * 100_000])
def test_a_string_that_is_no_schema_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r'^"json_schema" must be ') as caught:
        constraint_of(json_schema=source)
    assert caught.value.param == "json_schema"
