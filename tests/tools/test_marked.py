"""Calls whose arguments stand between marks: read whole and in any pieces, and of the types that their schema says."""

from __future__ import annotations

import json
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.tools import Tool
from serve_app.tools.forms import DEEPSEEK_V32, GLM45, GLM47, MINIMAX_M2, QWEN3_CODER, SEED_OSS, Form, layout_of
from serve_app.tools.parser import CallParser, parse_whole

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "place": {"$ref": "#/$defs/place"},
        "unit": {"enum": ["c", "f"]},
        "any": {},
    },
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
TOOLS = (Tool(name="weather", at=0, sent={}, parameters=SCHEMA), Tool(name="now", at=1, sent={}))
Calls = list[tuple[str, Any]]


def written(form: Form, name: str, arguments: dict[str, str]) -> str:
    """A call as the templates of the family write one."""
    layout, marks = layout_of(form, is_parallel=False), form.between
    assert marks is not None
    key = "".join(token for token in marks.key if not token.startswith("~"))
    values = "".join(key.replace("{key}", each) + value + marks.end for each, value in arguments.items())
    return layout.opening + layout.begin.replace("{name}", name) + values + layout.end + layout.closing


def streamed(form: Form, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, put together from the deltas as a client does."""
    numbers = count()
    parser = CallParser(form, TOOLS, new_id=lambda: f"id{next(numbers)}")
    content, calls = "", list[list[str]]()
    for parsed in [*map(parser.feed, pieces), parser.flush()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert (delta.index, delta.id) == (len(calls), f"id{len(calls)}")
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


def read(form: Form, text: str) -> tuple[str, Calls]:
    content, calls = parse_whole(form, text, TOOLS)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


MARKED = [QWEN3_CODER, SEED_OSS, GLM45, GLM47, MINIMAX_M2, DEEPSEEK_V32]
EVERY_FORM = pytest.mark.parametrize("form", MARKED, ids=lambda form: form.name)


@EVERY_FORM
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "Paris", "Paris"),
        ("city", "5", "5"),  # a string is one whatever it looks like
        ("city", ' a "b" <c>\n\n{d} ', ' a "b" <c>\n\n{d} '),
        ("city", "", ""),
        ("days", "5", 5),
        ("days", "five", "five"),  # nothing that is written gets lost
        ("deep", "true", True),
        ("deep", "True", True),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "7", "7"),
        ("places", '[{"x": 1.5}]', [{"x": 1.5}]),
        ("place", '{"x": NaN}', '{"x": NaN}'),
        ("unit", "c", "c"),
        ("any", "[1]", [1]),
        ("any", "[1", "[1"),
        ("places", "[{'x': None}, {'x': 2},]", [{"x": None}, {"x": 2}]),
        ("place", "{'x': True}", {"x": True}),
        ("unheard", "1", 1),
    ],
)
def test_an_argument_is_of_a_type_that_its_schema_allows(form: Form, key: str, text: str, value: Any) -> None:
    assert read(form, written(form, "weather", {key: text})) == ("", [("weather", {key: value})])


@EVERY_FORM
def test_several_calls_and_what_stands_around_them(form: Form) -> None:
    first, second = written(form, "weather", {"city": "Oslo", "days": "2"}), written(form, "now", {})
    expected = [("weather", {"city": "Oslo", "days": 2}), ("now", {})]
    assert read(form, f"See.\n{first}\n{second}\n") == ("See.\n", expected)
    assert read(form, f"{first} and {second}.") == (" and .", expected)


@EVERY_FORM
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n{}",
        "a < b and <tool_call",
        "<tool_call>\n<function=nobody>\n</function>\n</tool_call>",
        "<tool_call>nobody</tool_call>",
    ],
)
def test_what_is_no_call_is_content_to_the_letter(form: Form, text: str) -> None:
    assert read(form, text) == (text, [])
    assert streamed(form, list(text)) == (text, [])


PARTS: list[tuple[Form, str, Calls]] = [
    (QWEN3_CODER, "<function=now>\n</function>\n</tool_call>", [("now", {})]),
    (QWEN3_CODER, "<tool_call>\n<function=now>", [("now", {})]),
    (QWEN3_CODER, "<function=weather><parameter=city>Rome</parameter>", [("weather", {"city": "Rome"})]),
    (QWEN3_CODER, "<tool_call><function=weather><parameter=city>\nRome\n</function></tool_call>",
     [("weather", {"city": "Rome"})]),
    (QWEN3_CODER, "<tool_call><function=weather><parameter=city>\nRome", [("weather", {"city": "Rome"})]),
    (QWEN3_CODER, "<tool_call><function=weather><parameter=city>\nRome\n<parameter=days>\n3\n</parameter></function>",
     [("weather", {"city": "Rome", "days": 3})]),
    (QWEN3_CODER, "<tool_call><function=weather><parameter=city>Rome\n</function></tool_call>\n"
     "<tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>",
     [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})]),
    (QWEN3_CODER, '<tool_call><function="weather"><parameter="city">Rome</parameter></function></tool_call>',
     [("weather", {"city": "Rome"})]),
    (QWEN3_CODER, "<tool_call><function=weather><parameter=city>a </function> b <parameter=x> c</parameter></function>",
     [("weather", {"city": "a </function> b <parameter=x> c"})]),
    (QWEN3_CODER, '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>',
     [("weather", {"city": "Rome"})]),
    (SEED_OSS, "<function=weather><parameter=city>Rome</function>", [("weather", {"city": "Rome"})]),
    (GLM47, "weather<arg_key>city</arg_key><arg_value>Rome</tool_call>", [("weather", {"city": "Rome"})]),
    (GLM45, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome\n<arg_key>days</arg_key>\n<arg_value>3",
     [("weather", {"city": "Rome\n", "days": 3})]),
    (MINIMAX_M2, '<invoke name="weather">\n<parameter name="city">Rome\n</invoke>', [("weather", {"city": "Rome\n"})]),
    (DEEPSEEK_V32, '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="any" string="true">5'
     '</｜DSML｜parameter>\n'
     '<｜DSML｜parameter name="days" string="false">5</｜DSML｜parameter>',
     [("weather", {"any": "5", "days": 5})]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "calls"), PARTS)
def test_a_call_is_read_where_parts_are_left_out(form: Form, text: str, calls: Calls) -> None:
    assert read(form, f"So:\n{text}" if text.startswith("<") else text) == ("So:\n" if text[0] == "<" else "", calls)
    content, streamed_calls = streamed(form, list(text))
    assert (content, [(name, json.loads(arguments)) for name, arguments in streamed_calls]) == ("", calls)


@EVERY_FORM
def test_of_a_key_that_comes_twice_readers_take_the_last_value(form: Form) -> None:
    one, marks = written(form, "weather", {"city": "A"}), form.between
    assert marks is not None
    argument = one[one.index(marks.key[0]) : one.index(marks.end) + len(marks.end)]
    assert read(form, one.replace(argument, argument + argument.replace("A", "B"))) == (
        "",
        [("weather", {"city": "B"})],
    )


PIECES = st.sampled_from(
    (
        *(written(form, "weather", {"city": "Oslo", "days": "2"}) for form in MARKED),
        *(written(form, "now", {}) for form in (QWEN3_CODER, GLM45)),
        *("<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=city>", "</parameter>"),
        *("<arg_key>", "city", "</arg_key>", "<arg_value>", "</arg_value>", "weather", "now", "\n", " ", "<", "x"),
    )
)


@EVERY_FORM
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(PIECES, max_size=8), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_a_text_is_parted_alike_however_it_is_split(form: Form, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert streamed(form, pieces) == streamed(form, list(text)) == streamed(form, [text])


@EVERY_FORM
def test_what_is_streamed_is_json_up_to_where_it_came(form: Form) -> None:
    text = written(form, "weather", {"city": "Oslo", "days": "2"})
    parser, gained = CallParser(form, TOOLS), list[str]()
    for character in text:
        gained += [delta.arguments for delta in parser.feed(character).calls]
    assert [piece for piece in gained if piece] == ['{"city": "Oslo"', ', "days": 2', "}"]
    assert parser.is_whole


@EVERY_FORM
def test_a_long_value_is_searched_once(form: Form) -> None:
    """Each character is looked at a bounded number of times however the text comes."""
    head, tail = written(form, "weather", {"city": "@"}).split("@")
    parser = CallParser(form, TOOLS)
    parser.feed(head)
    for _ in range(50):
        parser.feed("x" * 100)
    assert parser._searched >= 50 * 100
    parser.feed(tail)
    assert parser.is_whole
