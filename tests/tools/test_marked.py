"""Calls whose arguments stand between marks: read whole and in any pieces, and of the types that their schema says."""

from __future__ import annotations

import json
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.tools import Tool
from serve_app.tools.forms import GLM45, GLM47, QWEN3_CODER, MarkedForm
from serve_app.tools.marked import MarkedCallParser
from serve_app.tools.whole import parse_whole

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


def written(form: MarkedForm, name: str, arguments: dict[str, str]) -> str:
    """A call as the templates of the family write one."""
    if form is QWEN3_CODER:
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
    space = form.space
    values = "".join(
        f"<arg_key>{key}</arg_key>{space}<arg_value>{value}</arg_value>{space}" for key, value in arguments.items()
    )
    return f"<tool_call>{name}{space}{values}</tool_call>"


def streamed(form: MarkedForm, pieces: list[str], *, holds_calls: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, put together from the deltas as a client does."""
    numbers = count()
    parser = MarkedCallParser(form, TOOLS, new_id=lambda: f"id{next(numbers)}", holds_calls=holds_calls)
    content, calls = "", list[list[str]]()
    for parsed in [*map(parser.feed, pieces), parser.flush()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert (delta.index, delta.id) == (len(calls), f"id{len(calls)}")
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


def read(form: MarkedForm, text: str) -> tuple[str, Calls]:
    content, calls = parse_whole(form, text, TOOLS)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


EVERY_FORM = pytest.mark.parametrize("form", [QWEN3_CODER, GLM45, GLM47], ids=lambda form: form.name)


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
        ("unheard", "1", 1),
    ],
)
def test_an_argument_is_of_a_type_that_its_schema_allows(form: MarkedForm, key: str, text: str, value: Any) -> None:
    assert read(form, written(form, "weather", {key: text})) == ("", [("weather", {key: value})])


@EVERY_FORM
def test_several_calls_and_what_stands_around_them(form: MarkedForm) -> None:
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
def test_what_is_no_call_is_content_to_the_letter(form: MarkedForm, text: str) -> None:
    assert read(form, text) == (text, [])
    assert streamed(form, list(text)) == (text, [])


@EVERY_FORM
@pytest.mark.parametrize("num_cut", [1, 12, 30])
def test_a_call_that_was_cut_off_is_content_where_calls_are_held(form: MarkedForm, num_cut: int) -> None:
    text = "So: " + written(form, "weather", {"city": "Oslo", "days": "2"})[:-num_cut]
    whole_without_closer = form is QWEN3_CODER and num_cut <= len("\n</tool_call>")
    content, calls = read(form, text)
    if whole_without_closer:
        assert (content, calls[0][1]) == ("So: </tool_call>"[:4] + content[4:], {"city": "Oslo", "days": 2})
    else:
        assert (content, calls) == (text, [])


@EVERY_FORM
def test_a_key_that_comes_twice_makes_no_call(form: MarkedForm) -> None:
    one = written(form, "weather", {"city": "A"})
    argument = one[one.index(form.key) : one.index(form.end) + len(form.end)]
    text = one.replace(argument, argument * 2)
    assert read(form, text) == (text, [])


PIECES = st.sampled_from(
    (
        *(written(form, "weather", {"city": "Oslo", "days": "2"}) for form in (QWEN3_CODER, GLM45, GLM47)),
        *(written(form, "now", {}) for form in (QWEN3_CODER, GLM45)),
        *("<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=city>", "</parameter>"),
        *("<arg_key>", "city", "</arg_key>", "<arg_value>", "</arg_value>", "weather", "now", "\n", " ", "<", "x"),
    )
)


@EVERY_FORM
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(PIECES, max_size=8), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_a_text_is_parted_alike_however_it_is_split(form: MarkedForm, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    for holds in (False, True):
        assert streamed(form, pieces, holds_calls=holds) == streamed(form, [text], holds_calls=holds)
        assert streamed(form, list(text), holds_calls=holds) == streamed(form, [text], holds_calls=holds)


@EVERY_FORM
def test_what_is_streamed_is_json_up_to_where_it_came(form: MarkedForm) -> None:
    text = written(form, "weather", {"city": "Oslo", "days": "2"})
    parser, gained = MarkedCallParser(form, TOOLS), list[str]()
    for character in text:
        gained += [delta.arguments for delta in parser.feed(character).calls]
    assert [piece for piece in gained if piece] == ['{"city": "Oslo"', ', "days": 2', "}"]
    assert parser.is_whole


@EVERY_FORM
def test_a_long_value_is_searched_once(form: MarkedForm) -> None:
    """Each character is looked at a bounded number of times however the text comes."""
    head, tail = written(form, "weather", {"city": "@"}).split("@")
    parser = MarkedCallParser(form, TOOLS)
    parser.feed(head)
    for _ in range(50):
        parser.feed("x" * 100)
    assert parser._searched >= 50 * 100
    parser.feed(tail)
    assert parser.is_whole
