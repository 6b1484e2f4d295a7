"""The work for a token: bounded for whatever is answered, and what soon needs more is refused before it begins."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from benchmarks.zoo import GRAMMARS, HARMLESS, SCHEMAS
from serve_app.constraints.compilation import NUM_FOLLOWED_RULES, build_matcher, compile_source
from serve_app.constraints.limits import Refusal, parser_limits
from serve_app.core.request import ConstraintKind
from tests.constraints.vocabularies import accepts, matcher_of, tokenizer

KINDS: dict[str, ConstraintKind] = {"regex": "regex", "json_schema": "json_schema", "grammar": "gbnf"}
AMBIGUOUS = {
    "left recursion": GRAMMARS["left recursion"],
    "three ways": GRAMMARS["three ways"],
    "nested": "root ::= r0*\n"
    + "\n".join(f"r{at} ::= r{at + 1} | r{at + 1} r{at + 1} | '(' r0 ')'" for at in range(30))
    + "\nr30 ::= 'a' | '(' r0 ')'",
}
C_GRAMMAR = r"""root ::= (declaration)*
declaration ::= type name "(" (type name)? ")" "{" statement* "}"
type ::= ("int" | "float" | "char") ws
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
statement ::= (type name ws "=" ws expression ";") | (name ws "=" ws expression ";") | (name ws "(" arguments? ")" ";")
  | ("return" ws expression ";") | ("while" "(" condition ")" "{" statement* "}")
  | ("if" "(" condition ")" "{" statement* "}" ("else" "{" statement* "}")?) | ("//" [^\n]* "\n")
condition ::= expression ("<=" | "<" | "==" | "!=" | ">=" | ">") expression
expression ::= term (("+" | "-") term)*
term ::= factor (("*" | "/") factor)*
factor ::= name | [0-9]+ | "-" factor | name "(" arguments? ")" | "(" ws expression ws ")"
arguments ::= expression ("," ws expression)*
ws ::= [ \t\n]+"""
HONEST = {
    "C": C_GRAMMAR,
    "sums, left recursive": "root ::= root '+' product | product\nproduct ::= product '*' part | part\n"
    "part ::= [0-9]+ | '(' root ')'",
    "sums, ambiguous": "root ::= root '+' root | root '*' root | '(' root ')' | [0-9]+ | [a-z]+",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_grammar_is_refused_before_a_text_begins(name: str) -> None:
    with pytest.raises(Refusal, match=r"too much work to follow|[Tt]oo many items"):
        matcher_of("gbnf", AMBIGUOUS[name])


def test_the_work_for_one_token_of_rules_ends_soon() -> None:
    """Where it grows more slowly than a trial goes on it is found later, by a text that ends with an error."""
    matcher = matcher_of("gbnf", "root ::= root root root | '%'")
    num_tokens = 0
    while not matcher.is_error():
        matcher.compute_bitmask()
        matcher.consume_token(ord("%"))
        num_tokens += 1
    assert NUM_FOLLOWED_RULES < num_tokens < 300


@pytest.mark.parametrize("name", HONEST)
def test_grammars_that_people_write_are_taken(name: str) -> None:
    matcher_of("gbnf", HONEST[name])


def test_a_long_sum_is_followed_to_its_end() -> None:
    for grammar in (HONEST["sums, left recursive"], HONEST["sums, ambiguous"]):
        assert accepts("gbnf", grammar, "+".join(["12*(3+4)"] * 9))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"name_{at}": {"type": "integer"} for at in range(400)}},
        {"anyOf": [
            {"type": "object", "properties": {"kind": {"const": f"kind {at}"}, "args": {"type": "object"}},
             "required": ["kind"]}
            for at in range(300)
        ]},
    ],
)  # fmt: skip
def test_a_wide_schema_is_taken(schema: dict[str, Any]) -> None:
    matcher_of("json_schema", json.dumps(schema))


def test_an_object_that_is_too_wide_is_refused_before_a_text_begins() -> None:
    with pytest.raises(Refusal, match="too much work to follow"):
        matcher_of("json_schema", json.dumps(SCHEMAS["900 names that may be left out"]))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_needs_a_fraction_of_what_is_allowed(name: str) -> None:
    """Its compile, and each of the first tokens."""
    each = HARMLESS[name]
    source = json.dumps(each.source) if isinstance(each.source, dict) else each.source
    grammar = compile_source(KINDS[each.parameter], source, tokenizer())
    limits = parser_limits(has_rules=grammar.has_rules)
    matcher = LLMatcher(
        tokenizer(),
        grammar.text,
        log_level=0,
        limits=LLParserLimits(
            max_items_in_row=limits.max_items_in_row // 4,
            initial_lexer_fuel=limits.initial_lexer_fuel // 2,
            step_lexer_fuel=limits.step_lexer_fuel // 4,
            step_max_items=limits.step_max_items // 4,
            max_lexer_states=limits.max_lexer_states // 4,
            max_grammar_size=limits.max_grammar_size // 4,
            verbose_errors=False,
        ),
    )
    for _ in range(24):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        matcher.consume_token(next(token_id for token_id in range(256) if mask[token_id // 8] >> token_id % 8 & 1))
        if matcher.is_stopped():
            break
    assert not matcher.is_error()


def test_limits_are_those_of_the_kind() -> None:
    """What was tried under the narrow limits is built under them."""
    grammar = compile_source("gbnf", "root ::= root root root | '%'", tokenizer())
    assert grammar.has_rules
    assert not compile_source("json_schema", "{}", tokenizer()).has_rules
    wide, narrow = (build_matcher(grammar.text, tokenizer(), has_rules=has_rules) for has_rules in (False, True))
    for _ in range(400):
        wide.consume_token(ord("%"))
        narrow.consume_token(ord("%"))
    assert (wide.is_error(), narrow.is_error()) == (False, True)
