"""Calls as constraints: what has to be a call is read as one, and what begins as one is one."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from serve_app.constraints.compilation import build_matcher, compile_source
from serve_app.constraints.compiler import Compiler
from serve_app.constraints.limits import Refusal
from serve_app.constraints.structural_tag import tool_calls_to_lark
from serve_app.constraints.vocabulary import Vocabulary
from serve_app.core.request import Constraint
from serve_app.core.tools import Tool, ToolChoice, ToolMode, Tools
from serve_app.tools.forms import (
    FORMS,
    GLM45,
    GLM47,
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    QWEN3_CODER,
    Form,
    call_constraint,
)
from serve_app.tools.parser import parse_whole
from tests.constraints.vocabularies import EOS, WORDS, accepts, allowed, tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
EVERY_FORM = pytest.mark.parametrize("form", dict.fromkeys(FORMS.values()), ids=lambda form: form.name)


def tools(
    mode: ToolMode = "required",
    *,
    is_strict: bool = True,
    is_parallel: bool = False,
    names: tuple[str, ...] | None = None,
    parameters: dict[str, Any] | None = SCHEMA,
) -> Tools:
    return Tools(
        sent=(
            Tool(name="weather", at=0, sent={}, parameters=parameters, is_strict=is_strict),
            Tool(name="now", at=1, sent={}, is_strict=is_strict),
        ),
        choice=ToolChoice(mode=mode, names=names),
        is_parallel=is_parallel,
    )


def demanded(of: Tools, form: Form, beside: Constraint | None = None) -> Constraint:
    found = call_constraint(of, form, beside)
    assert found is not None
    return found


def walk(constraint: Constraint, seed: int) -> str | None:
    """A text made of tokens that are allowed, at random; None where it does not end in time."""
    draws, content = random.Random(seed), b""
    matcher = build_matcher(compile_source(constraint.kind, constraint.source, tokenizer()).text, tokenizer())
    while not matcher.is_stopped():
        token_id = draws.choice(allowed(matcher))
        if token_id == EOS:
            break
        content += bytes([token_id]) if token_id < 256 else WORDS[token_id - 256]
        matcher.consume_token(token_id)
        if len(content) > 600:
            return None
    return content.decode("utf-8", "replace")


@pytest.mark.law("Calls")
@EVERY_FORM
@pytest.mark.parametrize("is_parallel", [False, True])
def test_whatever_is_allowed_is_read_as_calls_that_satisfy_their_schemas(form: Form, is_parallel: bool) -> None:
    of = tools(is_parallel=is_parallel)
    constraint = demanded(of, form)
    texts = [text for seed in range(12) if (text := walk(constraint, seed)) is not None]
    counts = set()
    for text in texts:
        content, calls = parse_whole(form, text, of.usable)
        assert (content, bool(calls)) == ("", True), text
        counts.add(len(calls))
        for call in calls:
            schema = SCHEMA if call.name == "weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.arguments), schema)
    assert len(texts) > 6
    assert (max(counts) > 1) is is_parallel


@EVERY_FORM
def test_a_named_function_is_the_only_one(form: Form) -> None:
    constraint = demanded(tools(names=("now",)), form)
    texts = [text for seed in range(9) if (text := walk(constraint, seed)) is not None]
    assert texts
    for text in texts:
        _, calls = parse_whole(form, text, tools().sent)
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("now", {})]


WEATHER = '{"name": "weather", "arguments": %s}'


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_call_that_is_required_satisfies_its_schema_strict_or_not(is_strict: bool) -> None:
    source = demanded(tools(is_strict=is_strict), JSON).source
    assert accepts("tools", source, WEATHER % '{"city": "Rome"}')
    for text in (WEATHER % '{"planet": [1]}', WEATHER % '{"city": "Oslo"}', WEATHER % "[1]", "text"):
        assert not accepts("tools", source, text)


@pytest.mark.parametrize(
    "unknown", [{"contains": {}}, {"pattern": "(?=a)"}, {"uniqueItems": True, "type": "array"}, {"type": "nothing"}]
)
def test_a_schema_that_cannot_be_followed_leaves_a_tool_that_is_not_strict_any_object(unknown: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"city": unknown}}
    source = demanded(tools(is_strict=False, parameters=parameters), JSON).source
    assert accepts("tools", source, WEATHER % '{"planet": [1]}')
    assert not accepts("tools", source, WEATHER % "[1]")
    with pytest.raises(Refusal):
        compile_source("tools", demanded(tools(parameters=parameters), JSON).source, tokenizer())


def test_where_the_model_chooses_only_strict_tools_hold_arguments_to_their_schema() -> None:
    beside = Constraint(kind="json_schema", source='{"type":"integer"}', name="response_format")
    for is_strict in (True, False):
        source = demanded(tools("auto", is_strict=is_strict), JSON, beside).source
        assert accepts("tools", source, WEATHER % '{"planet": [1]}') is not is_strict


FREE: list[tuple[Form, list[str], list[str]]] = [
    (
        HERMES,
        ["", "text", 'a <tool> {"name": "x"', 'See: <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'],
        ["<tool_call>", "<tool_call>no", '<tool_call>\n{"name": "weather", "arguments": {"city": 5}}\n</tool_call>'],
    ),
    (
        LLAMA3,
        ["", "text", '{"a": 1}', "{", '{"name": "now", "parameters": {}}'],
        ['{"name": "other"}', '{"name": "weather", "parameters": {}}', ' {"name": 5}'],
    ),
    (
        JSON,
        ["", "text", '{"names": 1}', '{"name": "weather", "arguments": {"city": "Rome"}}'],
        ['{"name": "John"}', '[{"name": "now"}]', '{"name": "now", "arguments": {"a": 1}}'],
    ),
    (
        MISTRAL,
        ["", "[1]", 'text [TOOL_CALLS][{"name": "now", "arguments": {}}]'],
        ["[TOOL_CALLS]", "[TOOL_CALLS]now", '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1}}]'],
    ),
    (
        QWEN3_CODER,
        ["", "a <tool> <function=x>", "See: <tool_call>\n<function=now>\n</function>\n</tool_call>"],
        [
            "<tool_call>",
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=weather>\n</function>\n</tool_call>",
        ],
    ),
    (
        GLM47,
        ["", "text", "See: <tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"],
        ["<tool_call>now", "<tool_call>weather</tool_call>", "<tool_call>other</tool_call>"],
    ),
    (
        MISTRAL_NAMED,
        ["text", "text [TOOL_CALLS]now[ARGS]{}"],
        ["[TOOL_CALLS]now", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"],
    ),
]


@pytest.mark.parametrize(("form", "taken", "refused"), FREE, ids=[form.name for form, _, _ in FREE])
def test_where_the_model_chooses_what_begins_as_a_call_is_one(form: Form, taken: list[str], refused: list[str]) -> None:
    source = demanded(tools("auto"), form).source
    assert [text for text in (*taken, *refused) if accepts("tools", source, text)] == taken


def test_text_and_calls_may_alternate_where_calls_are_parallel() -> None:
    source = demanded(tools("auto", is_parallel=True), HERMES).source
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts("tools", source, f"a{call}b{call}\n{call} c")
    assert not accepts("tools", source, f"a{call}b<tool_call>")


def test_a_choice_without_strict_tools_demands_nothing() -> None:
    assert call_constraint(tools("auto", is_strict=False), HERMES) is None
    assert call_constraint(tools("none"), HERMES) is None
    assert call_constraint(Tools(), HERMES) is None


@pytest.mark.parametrize(
    ("beside", "text"),
    [
        (Constraint(kind="json_schema", source='{"type":"integer"}', name="response_format"), "15"),
        (Constraint(kind="regex", source="a/b+", name="regex"), "a/bb"),
        (Constraint(kind="gbnf", source="root ::= 'x' root | 'y'", name="grammar"), "xxy"),
    ],
)
def test_beside_a_constraint_a_text_is_what_that_says_or_a_call(beside: Constraint, text: str) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for is_strict in (True, False):
        constraint = demanded(tools("auto", is_strict=is_strict), HERMES, beside)
        if constraint is beside:  # it says what the whole text is, and nobody asked that calls be let through
            assert (beside.kind == "json_schema", is_strict) == (False, False)
            continue
        source = constraint.source
        assert [each for each in (text, call, "text", text + call) if accepts("tools", source, each)] == [text, call]


def test_a_constraint_that_calls_cannot_stand_beside_stays_alone() -> None:
    beside = Constraint(kind="lark", source='start: "a"', name="grammar")
    assert call_constraint(tools("auto"), HERMES, beside) is beside
    assert call_constraint(tools("none"), HERMES, beside) is beside


@pytest.mark.parametrize(
    ("parameters", "path", "reason"),
    [
        ({"properties": {"x": {"contains": {}}}}, "#/0/function/parameters/properties/x", '"contains"'),
        ({"properties": {"x": {"pattern": "(?=a)"}}}, "#/0/function/parameters/properties/x", '"pattern"'),
        ({"$ref": "#/$defs/y"}, "#/0/function/parameters", ""),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_told_by_its_tool_and_path(
    parameters: dict[str, Any], path: str, reason: str
) -> None:
    constraint = demanded(tools(parameters=parameters), HERMES)
    with pytest.raises(Refusal) as caught:
        compile_source(constraint.kind, constraint.source, tokenizer())
    assert caught.value.path == path
    assert reason in caught.value.message
    assert str(caught.value.of(constraint)).startswith(
        f'"tools" must hold JSON schemas of arguments that can be followed; found this at {path}: '
    )


def test_what_a_constraint_beside_lacks_is_told_by_its_own_name() -> None:
    beside = Constraint(kind="json_schema", source='{"contains":{}}', name="response_format")
    with pytest.raises(Refusal) as caught:
        compile_source("tools", demanded(tools("auto"), HERMES, beside).source, tokenizer())
    assert caught.value.path == "response_format #"


def test_marks_are_special_tokens_where_the_model_has_them() -> None:
    """Their names as text would be something else to the model."""
    opener, args = 256, 257
    special = (("[TOOL_CALLS]", opener), ("[ARGS]", args), ("[INST]", 258))
    vocabulary = Vocabulary(
        pieces=(*(bytes([each]) for each in range(256)), None, None, None, None), eos_token_ids=(259,), special=special
    )
    model = vocabulary.tokenizer()

    def taken(mode: ToolMode, tokens: list[int]) -> bool:
        constraint = demanded(tools(mode), MISTRAL_NAMED)
        text = compile_source(constraint.kind, constraint.source, model, dict(special)).text
        matcher: LLMatcher = build_matcher(text, model)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    call = [opener, *b"now", args, *b"{}"]
    for mode in ("required", "auto"):
        assert taken(mode, call)
        assert not taken(mode, [opener, *b"other", args, *b"{}"])
    assert not taken("required", list(b"[TOOL_CALLS]now[ARGS]{}"))
    assert taken("auto", list(b"text"))
    assert taken("auto", [*b"text", *call])
    assert taken("auto", [258, *b"text", 258, *call])
    assert not taken("auto", [258, opener, *b"other", args, *b"{}"])


def test_a_model_that_thinks_between_special_tokens_may_do_so_beside_a_strict_tool() -> None:
    names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    special = {name: 256 + at for at, name in enumerate(names)}
    pieces = (*(bytes([each]) for each in range(256)), *(None,) * 6)
    model = Vocabulary(pieces=pieces, eos_token_ids=(261,), special=tuple(special.items())).tokenizer()
    constraint = demanded(tools("auto"), FORMS["harmony"])
    text = compile_source(constraint.kind, constraint.source, model, special).text

    def taken(text_taken: str) -> bool:
        pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text_taken)
        tokens = [token for piece in pieces for token in ([special[piece]] if piece in special else piece.encode())]
        matcher: LLMatcher = build_matcher(text, model)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>"
    call = "commentary to=functions.weather <|constrain|>json<|message|>"
    assert taken(f"{thought}final<|message|>4")
    assert taken(f'{thought}{call}{{"city": "Rome"}}')
    assert not taken(f'{thought}{call}{{"city": 4}}')


async def test_special_tokens_are_known_where_constraints_are_tried() -> None:
    special = (("[TOOL_CALLS]", 256), ("[ARGS]", 257))
    pieces = (*(bytes([each]) for each in range(256)), None, None, None)
    vocabulary = Vocabulary(pieces=pieces, eos_token_ids=(258,), special=special)
    compiler = Compiler(lambda: vocabulary)
    try:
        matcher = (await compiler.compile(demanded(tools(), MISTRAL_NAMED))).matcher()
    finally:
        compiler.close()
    for token_id in (256, *b"now", 257, *b"{}"):
        matcher.advance(token_id)
    assert matcher.failure is None
    assert matcher.may_end


RICH = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
        "size": {"$ref": "#/$defs/size"},
        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}, {"$ref": "#/$defs/size"}]},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
        "kind": {"enum": ["one", 2, None]},
    },
    "required": ["name", "code", "note", "kind"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 1, "maximum": 99}},
}


@pytest.mark.parametrize("form", [QWEN3_CODER, GLM45, GLM47], ids=lambda form: form.name)
def test_between_marks_arguments_of_every_type_satisfy_their_schema(form: Form) -> None:
    of = tools(parameters=RICH, names=("weather",))
    constraint = demanded(of, form)
    texts = [text for seed in range(16) if (text := walk(constraint, seed)) is not None]
    assert len(texts) > 6
    for text in texts:
        content, (call,) = parse_whole(form, text, of.usable)
        assert content == ""
        jsonschema.validate(json.loads(call.arguments), RICH)


STRING = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
BETWEEN: list[tuple[Form, str]] = [
    (QWEN3_CODER, "<tool_call>\n<function=weather>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"),
    (GLM45, "<tool_call>weather\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
    (GLM47, "<tool_call>weather<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>"),
]


@pytest.mark.parametrize(("form", "text"), BETWEEN, ids=[form.name for form, _ in BETWEEN])
def test_a_string_between_marks_may_hold_anything_but_the_mark_behind_it(form: Form, text: str) -> None:
    source = demanded(tools(parameters=STRING, names=("weather",)), form).source
    for value in ("", "5", "a\n\n b</x>", '{"a": "\\"}', "</parameter", "<arg_value>", "日本 😀"):
        assert accepts("tools", source, text.format(value))
    assert form.between is not None
    assert not accepts("tools", source, text.format(f"a\n{form.between.end.strip()}\nb"))


@pytest.mark.parametrize(("form", "text"), BETWEEN, ids=[form.name for form, _ in BETWEEN])
def test_marks_that_are_tokens_of_their_own_are_written_as_these(form: Form, text: str) -> None:
    special = {"<tool_call>": 250, "<arg_key>": 251, "</arg_value>": 252}
    grammar, _ = tool_calls_to_lark(demanded(tools(parameters=STRING, names=("weather",)), form).source, special)
    matcher = build_matcher(grammar, tokenizer())
    pieces = re.split("(" + "|".join(special) + ")", text.format("Oslo"))
    token_ids = [token for piece in pieces for token in ([special[piece]] if piece in special else piece.encode())]
    assert matcher.validate_tokens(token_ids) == len(token_ids)
    assert matcher.validate_tokens(list(text.format("Oslo").encode())) == 0


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ({"minProperties": 1}, "#/0/function/parameters"),
        ({"properties": {"a<b": {}}}, "#/0/function/parameters/properties/a<b"),
        ({"properties": {"x": {"type": "string", "not": {"const": "a"}}}}, "#/0/function/parameters/properties/x"),
        ({"required": ["y"]}, "#/0/function/parameters"),
        ({"properties": {"x": {"type": "array", "contains": {}}}}, "#/0/function/parameters/properties/x"),
    ],
)
def test_what_cannot_be_told_between_marks_is_refused_by_tool_and_path(part: dict[str, Any], path: str) -> None:
    constraint = demanded(tools(parameters={"type": "object", **part}), QWEN3_CODER)
    with pytest.raises(Refusal) as caught:
        compile_source(constraint.kind, constraint.source, tokenizer())
    assert caught.value.path == path
