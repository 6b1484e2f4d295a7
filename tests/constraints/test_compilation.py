"""Which tokens are forced: those that a mask allows alone, and none where finding them would take long."""

from __future__ import annotations

import json
from random import Random

import pytest

from serve_app.constraints.compilation import MAX_LITERAL_CHARS, WITHOUT, compile_source, forces_little, without_forcing
from serve_app.constraints.limits import Refusal
from serve_app.constraints.vocabulary import Matcher
from serve_app.core.request import ConstraintKind
from tests.constraints.schemas import random_schema
from tests.constraints.vocabularies import allowed, matcher_of, tokenizer

LONG = "ab, " * 5000
HOSTILE: dict[str, tuple[ConstraintKind, str]] = {
    "constant": ("json_schema", json.dumps({"const": LONG})),
    "one of two": ("json_schema", json.dumps({"enum": ["x", LONG]})),
    "name": ("json_schema", json.dumps({"type": "object", "properties": {LONG: {}}, "required": [LONG]})),
    "pattern": ("json_schema", json.dumps({"type": "string", "pattern": "^a{5000}$"})),
    "pattern of patterns": ("json_schema", json.dumps({"type": "string", "pattern": "^((a{50}){50})$"})),
    "least length": ("json_schema", json.dumps({"type": "string", "pattern": "^a+$", "minLength": 5000})),
    "items": ("compact_json", json.dumps({"type": "array", "items": {"const": 1}, "minItems": 900, "maxItems": 900})),
    "choice": ("choice", json.dumps([LONG])),
    "regex": ("regex", "a{5000}"),
    "grammar": ("gbnf", 'root ::= x{50}\nx ::= y{50}\ny ::= "ab"'),
    "lark": ("lark", 'start: x{50}\nx: "ab"{50}\n%llguidance {"no_forcing": false}'),
    "llguidance": ("llguidance", json.dumps({"grammars": [{"json_schema": {"const": LONG}}]})),
    "structural tag": (
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": LONG}}),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_of_a_long_text_that_is_forced_no_token_is_looked_for(name: str) -> None:
    matcher = matcher_of(*HOSTILE[name])
    for _ in range(5):
        assert matcher.compute_ff_tokens() == []
        found = allowed(matcher)
        assert not matcher.is_error()
        matcher.consume_token(found[-1])


@pytest.mark.law("Force")
@pytest.mark.parametrize("seed", range(60))
def test_a_forced_token_is_the_only_one_that_a_mask_allows(seed: int) -> None:
    draw = Random(seed)
    try:
        kind: ConstraintKind = "compact_json" if seed % 2 else "json_schema"
        matcher = matcher_of(kind, json.dumps(random_schema(seed)))
    except Refusal:
        return
    follower = Matcher(matcher, num_words=1)
    for _ in range(60):
        token_id, found = follower.forced, allowed(matcher)
        if follower.is_complete or follower.failure is not None:
            return
        assert token_id is None or found == [token_id]
        follower.advance(draw.choice(found))


def test_tokens_are_forced_where_the_names_of_a_schema_are() -> None:
    schema = {"type": "object", "properties": {"a_name_of_some_length": {"type": "null"}}}
    schema |= {"required": ["a_name_of_some_length"], "additionalProperties": False}
    follower = Matcher(matcher_of("compact_json", json.dumps(schema)), num_words=1)
    found = []
    while not follower.is_complete:
        token_id = follower.forced
        assert token_id is not None
        follower.advance(token_id)
        found.append(token_id)
    assert tokenizer().decode_str(found) == '{"a_name_of_some_length":null}'


def test_what_was_taken_back_can_be_taken_again() -> None:
    follower = Matcher(matcher_of("choice", '["abcdefgh"]'), num_words=1)
    first = follower.forced
    assert first is not None
    follower.advance(first)
    second = follower.forced
    follower.go_back(1)
    assert follower.forced == first
    follower.advance(first)
    assert follower.forced == second


@pytest.mark.parametrize(
    ("schema", "is_compact", "expected"),
    [
        ({"const": "x" * MAX_LITERAL_CHARS}, False, True),
        ({"const": "x" * (MAX_LITERAL_CHARS + 1)}, False, False),
        ({"items": {"enum": [1, "x" * (MAX_LITERAL_CHARS + 1)]}}, False, False),
        ({"pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"}, False, True),
        ({"pattern": "^a{65}$"}, False, False),
        ({"pattern": "^((a{9}){9})$"}, False, False),
        ({"minLength": 65}, False, True),
        ({"minLength": 65, "pattern": "a"}, False, False),
        ({"patternProperties": {"^a{99}$": {}}}, False, False),
        ({"minItems": 2}, False, True),
        ({"minItems": 2}, True, False),
        ({"minItems": 1}, True, True),
    ],
)
def test_a_schema_forces_little_where_nothing_in_it_is_long(schema: object, is_compact: bool, expected: bool) -> None:
    assert forces_little(schema, is_compact=is_compact) is expected


@pytest.mark.parametrize("text", ["{", "{}", '{"grammars": 5}', '{"grammars": [5]}'])
def test_what_is_no_grammar_is_left_for_the_library_to_refuse(text: str) -> None:
    assert without_forcing(text) == text
    with pytest.raises(Refusal):
        compile_source("llguidance", text, tokenizer())


def test_of_several_lines_the_last_one_counts() -> None:
    assert without_forcing("start: /a/").endswith(WITHOUT)
