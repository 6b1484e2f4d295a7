"""What nobody could write to its end is refused, by the part that asks for it; what people write is not."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest

from serve_app.constraints.limits import MAX_SHORTEST_CHARS, MOST, Refusal, shortest_match
from tests.constraints.schemas import PATTERNS
from tests.constraints.vocabularies import accepts, matcher_of

LONG = "x" * (MAX_SHORTEST_CHARS + 1)


@pytest.mark.parametrize(
    ("regex", "length"),
    [
        ("", 0), ("abc", 3), ("a|bcd|", 0), ("ab|cde", 2), ("(ab|c){3}d?", 3), ("(?:ab){2,}", 4), ("a{2}{3}", 6),
        ("a{3}?b", 4), (r"\d{4}-\d{2}", 7), (r"\p{L}+\x41\u0042\u{43}", 4), ("[^]a]{5}[]a]", 6), (r"[a\]b]{2}", 2),
        ("^a$", 1), (r"\bab\b", 2), ("(?i)ab", 2), ("(?P<n>a){2}", 2), (".*a+", 1), ("((a{1000}){1000}){1000}", 10**9),
        ("a{99999999999999999999999}", MOST), ("((a{99999}){99999}){99999}", MOST), ("a{", 2), ("(a", 0), ("a)", 0),
        ("[[:alpha:]]{3}", 3), ("a{1, }", 1), ("a{1," + " " * 250_000, 250_004),  # which ends before anybody has left
    ],
)  # fmt: skip
def test_the_shortest_text_of_a_regular_expression(regex: str, length: int) -> None:
    assert shortest_match(regex) == length


def test_no_text_that_matches_is_shorter() -> None:
    random, parts = Random(5), ("a", "b", "(ab|c)", "[ab]", "a{2}", "(a|bc){2,3}", "c?", "b*", "(a|)", "|", r"\.", "x+")
    found = 0
    for _ in range(400):
        regex = "".join(random.choices(parts, k=random.randrange(1, 5)))
        compiled, least = re.compile(regex), shortest_match(regex)
        for _ in range(60):
            text = "".join(random.choices("abcx.", k=random.randrange(7)))
            if compiled.fullmatch(text):
                found += 1
                assert len(text) >= least, (regex, text)
    assert found > 1000
    assert all(shortest_match(pattern) < 10 for pattern in PATTERNS)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array", "minItems": 10**9}, "#"),
        ({"type": "string", "minLength": 10**9}, "#"),
        ({"properties": {"a": {"const": LONG}}}, "#/properties/a"),
        ({"enum": [LONG, LONG + "y"]}, "#"),
        ({"items": {"type": "string", "pattern": "^(ab{300}){300}$"}}, "#/items"),
        ({"anyOf": [{"type": "null"}, {"allOf": [{"type": "string", "minLength": 10**6}]}]}, "#/anyOf/1/allOf/0"),
        ({"additionalProperties": {"type": "array", "items": {"type": "array", "minItems": 300}, "minItems": 300}},
         "#/additionalProperties"),
        ({"patternProperties": {"a/b": {"const": LONG}}}, "#/patternProperties/a~1b"),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"const": LONG}]}, "#/prefixItems/1"),
        ({"type": "object", "properties": {LONG: {}}, "required": [LONG]}, "#"),
        ({"$ref": "#/$defs/a0", "$defs": {
            f"a{at}": {"type": "array", "items": {"$ref": f"#/$defs/a{at + 1}"}, "minItems": 2} for at in range(20)
        } | {"a20": {}}}, "#/$defs/a5"),
    ],
)  # fmt: skip
def test_a_schema_out_of_reach_is_refused_by_path(schema: object, path: str) -> None:
    with pytest.raises(Refusal, match=f"its shortest text has .* {MAX_SHORTEST_CHARS} are allowed") as caught:
        matcher_of("json_schema", json.dumps(schema))
    assert caught.value.path == path


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 2_147_483_647},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2**31},
        {"type": ["string", "null"], "minLength": 10**9},  # null is short
        {"enum": ["a", LONG]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 0},
        {"type": "array", "prefixItems": [{"const": "x" * 30_000}] * 3},  # none of them need be there
        {"type": "string", "minLength": 2000.0},
    ],
)
def test_a_schema_within_reach_is_taken(schema: dict[str, Any]) -> None:
    matcher_of("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= x{1000}\nx ::= y{1000}\ny ::= 'ab'",
        "\n".join(["root ::= r0", *(f"r{at} ::= r{at + 1} r{at + 1}" for at in range(60)), "r60 ::= 'a'"]),
        "root ::= 'a'{99999} | 'b'{99999}",
        "root ::= list{70000}\nlist ::= 'a' list? ']'",
    ],
)
def test_a_grammar_out_of_reach_is_refused(grammar: str) -> None:
    with pytest.raises(Refusal, match="its shortest text has"):
        matcher_of("gbnf", grammar)


def test_a_rule_out_of_reach_that_nothing_has_to_take_is_no_reason() -> None:
    assert accepts("gbnf", "root ::= 'b' | x\nx ::= 'a'{99999}", "b")


def test_other_sources_are_held_to_the_same() -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "a{99999}"}}
    for kind, source in (("regex", "(ab){99999}"), ("choice", json.dumps([LONG])), ("structural_tag", json.dumps(tag))):
        with pytest.raises(Refusal, match="its shortest text has"):
            matcher_of(kind, source)  # type: ignore[arg-type]
