"""GBNF, regular expressions and structural tags: what is of their language, and what is said of those that are none."""

from __future__ import annotations

import json

import pytest

from serve_app.constraints.limits import Refusal
from tests.constraints.vocabularies import EOS, accepted_of, accepts, allowed, matcher_of

ARITHMETIC = (
    "root ::= expr\nexpr ::= term (('+' | '-') term)*\nterm ::= factor (('*' | '/') factor)*\n"
    "factor ::= [0-9]+ | '(' expr ')'"
)
JSON_OF_LLAMA_CPP = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "accepted"),
    [
        (ARITHMETIC, "1 12+3 (1+2)*3 ((1))/2*3-4 () 1+ +1 (1", "1 12+3 (1+2)*3 ((1))/2*3-4"),
        (JSON_OF_LLAMA_CPP, '{} {"é":[{"b":"c\\n"},true]} {"a":} [1] {"a":01}', '{} {"é":[{"b":"c\\n"},true]}'),
        ('root ::= "a" | \'b"\'', 'a b" b ab', 'a b"'),
        ('root ::= [^ab\\n]{2}', "cd ca éü c", "cd éü"),
        ('root ::= [a\\-c] .', "ax -é bx c", "ax -é"),
        ('root ::= "a"{2,3} "b"{2} "c"{1,} "d"{,1}', "aabbc aaabbccd abbc aabbcdd aabb", "aabbc aaabbccd"),
        ('root ::= "\\x41\\u00e9\\U0001F600\\t"?', "Aé😀\t A", "Aé😀\t"),
        ("root ::= list\nlist ::= item-a |\n  item-a ',' list\nitem-a ::= ('x' | 'y')+", "x xy,y , x,", "x xy,y"),
        ("root ::= 'a'* b\nb ::= 'a' | 'c'", "a aaa aac c b", "a aaa aac c"),  # nothing is lost to the longest lexeme
        ("root ::= 'a' root 'b' | ''", "ab aabb aab  ba", "ab aabb "),
    ],
)  # fmt: skip
def test_a_grammar_accepts_its_language(grammar: str, texts: str, accepted: str) -> None:
    assert " ".join(accepted_of("gbnf", grammar, texts)) == accepted


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ("roo ::= 'a'", 'no rule "root'),
        ("root ::= 'a", 'line 1: "\'a" is not part'),
        ("root ::= 'a'\n\nb ::= ('x'", 'at the end: expected ")"'),
        ("root ::= a", 'names "a", which is no rule'),
        ("root ::= 'a'\nroot ::= 'b'", "stands there twice"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= []", "no character"),
        ("root ::= 'a'{3,2}", "ends below its beginning"),
        ("root ::= 'a'{99999999999}", "no number of repetitions"),
        ("root ::= '\\uD800'", "is no character"),
        ("root ::= " + "(" * 200 + "'a'" + ")" * 200, "nested more than 100 deep"),
        ("'a'", "expected a rule"),
        ("root ::= root 'a'", "no text"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_place(grammar: str, told: str) -> None:
    with pytest.raises(Refusal) as caught:
        matcher_of("gbnf", grammar)
    assert told in caught.value.message


def test_a_regular_expression_is_of_the_whole_text() -> None:
    assert " ".join(accepted_of("regex", "^a+|b$", "a aa b ab c")) == "a aa b"
    assert allowed(matcher_of("regex", "")) == [EOS]
    for wrong in ("(", "(?=a)b", r"(a)\1"):
        with pytest.raises(Refusal, match="invalid regex"):
            matcher_of("regex", wrong)


def test_a_text_that_may_only_end_is_complete_with_its_last_token() -> None:
    matcher = matcher_of("regex", "ab?")
    assert matcher.consume_token(ord("a"))
    assert (matcher.is_stopped(), matcher.is_accepting()) == (False, True)
    assert allowed(matcher) == [ord("b"), EOS]
    assert matcher.consume_token(ord("b"))
    assert matcher.is_stopped()


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}  # fmt: skip


@pytest.mark.parametrize(
    ("tag", "accepted", "refused"),
    [
        (TAGS, ["", "hi", "x<f=b>1</f>y<", '<f=a>{"x":1}</f><f=b>2</f>'], ["<f=c>1</f>", "<f=a>{}</f>", "<f=b>1"]),
        (
            {"format": {"type": "sequence", "elements": [
                {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}, INTEGER]}},
            ["<t>a<b</t>1"], ["<t>1", "1", "<t></t>"],
        ),
        (
            {"format": {"type": "or", "elements": [
                {"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": "a/b+"},
                {"type": "grammar", "grammar": "root ::= 'x' root | 'y'"}]}},
            ["yes", "a/bb", "xxy"], ["no", "a/", "x"],
        ),
        (
            {"format": {"type": "tags_with_separator", "separator": ",", "at_least_one": True,
                        "tags": [{"begin": "<", "content": INTEGER, "end": ">"}]}},
            ["<1>", "<1>,<2>"], ["", "<1>,", "<1><2>"],
        ),
        (
            {"format": {"type": "triggered_tags", "triggers": ["<"], "at_least_one": True, "stop_after_first": True,
                        "tags": [{"begin": "<n>", "content": INTEGER, "end": "</n>"}]}},
            ["<n>1</n>", "so <n>1</n>"], ["so", "<n>1</n>."],
        ),
    ],
)  # fmt: skip
def test_a_structural_tag_leaves_text_free_up_to_its_triggers(
    tag: object, accepted: list[str], refused: list[str]
) -> None:
    source = json.dumps(tag)
    assert [text for text in (*accepted, *refused) if accepts("structural_tag", source, text)] == accepted


@pytest.mark.parametrize(
    ("tag", "path"),
    [
        ({}, ""),
        ({"format": {"type": "qwen_xml_parameter"}}, "#/format"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, INTEGER]}}, "#/format/elements/0"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["["]}, "#/tags/0"),
        ({"structures": [{"begin": "<a>", "schema": {"not": {"type": "null"}}, "end": ""}], "triggers": ["<"]},
         "#/tags/0/content"),
    ],
)  # fmt: skip
def test_a_structural_tag_that_cannot_be_enforced_is_refused_with_its_place(tag: object, path: str) -> None:
    with pytest.raises(Refusal) as caught:
        matcher_of("structural_tag", json.dumps(tag))
    assert caught.value.path == path
