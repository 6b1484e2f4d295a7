"""Literals as models write them become JSON, however they are cut; JSON itself is kept to the letter."""

from __future__ import annotations

import ast
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.tools.literals import LiteralReader, as_json

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
NEAR = st.text("{}[]()\"':,=\\uxe019-+.TruefalsNon\n", max_size=14).map(lambda text: "{" + text)
CUTS = st.lists(st.integers(0), max_size=5)


def read(text: str, cuts: list[int], *, is_call: bool = False) -> tuple[str, str, str]:
    """How it ends, what it gives, and what of the text it leaves, fed in these pieces."""
    reader, written, buffer = LiteralReader(is_call=is_call), "", ""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        buffer += text[start:end]
        buffer = buffer[reader.feed(buffer) :]
        written += reader.take()
    buffer = buffer[reader.feed(buffer, is_last=True) :]
    return reader.state, written + reader.take(), buffer


@settings(max_examples=300, deadline=None)
@given(value=OBJECTS, indent=st.none() | st.integers(0, 3), behind=st.text(max_size=5), cuts=CUTS)
def test_json_is_kept_to_the_letter_and_ends_where_it_does(
    value: dict[str, Any], indent: int | None, behind: str, cuts: list[int]
) -> None:
    written = json.dumps(value, indent=indent)
    assert read(written + behind, cuts) == ("complete", written, behind)


@settings(max_examples=300, deadline=None)
@given(value=OBJECTS, cuts=CUTS)
def test_what_python_writes_is_the_same_value(value: dict[str, Any], cuts: list[int]) -> None:
    state, written, _ = read(repr(value), cuts)
    assert (state, json.loads(written)) == ("complete", value)


@settings(max_examples=800, deadline=None)
@given(text=NEAR, cuts=CUTS)
def test_whatever_is_taken_is_json_and_the_same_however_it_is_cut(text: str, cuts: list[int]) -> None:
    state, written, left = read(text, cuts)
    assert (state, written, left) == read(text, [])
    if state == "complete":
        json.loads(written)
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return
    if "NaN" not in text:
        assert (state, json.loads(written), left) == ("complete", value, text[end:])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'a': True, 'b': [None, False],}", {"a": True, "b": [None, False]}),
        ("""{"a": 'it\\'s "x"'}""", {"a": 'it\'s "x"'}),
        ('{a: 1, "b": (1, 2,)}', {"a": 1, "b": [1, 2]}),
        ('{city:<|"|>Ro"m\\e<|"|>,n:-.5}', {"city": 'Ro"m\\e', "n": -0.5}),
        ('{<|"|>a b<|"|>:5.}', {"a b": 5.0}),
        ('{"a": "two\nlines\t"}', {"a": "two\nlines\t"}),
        ('{"a": """x"y\n"""}', {"a": 'x"y\n'}),
        (r'{"a": "\d \x41 \u00e9 \u12"}', {"a": "\\d A é \\u12"}),
        ('{"a": ""}', {"a": ""}),
        ("{1: 2}", {"1": 2}),
    ],
)
def test_what_models_write_instead_of_json_is_read(text: str, value: Any) -> None:
    for cuts in ([], list(range(len(text)))):
        state, written, left = read(text, cuts)
        assert (state, json.loads(written), left) == ("complete", value, "")


@pytest.mark.parametrize("text", ["()", '(city="Rome")', "(a=1, b=[1, 2,], c={'d': None}, )", "(a = 'x=y')"])
def test_keyword_arguments_are_an_object(text: str) -> None:
    keywords = ast.parse(f"f{text}", mode="eval").body.keywords  # type: ignore[attr-defined]
    value = {each.arg: ast.literal_eval(each.value) for each in keywords}
    for cuts in ([], list(range(len(text)))):
        state, written, _ = read(text, cuts, is_call=True)
        assert (state, json.loads(written)) == ("complete", value)


@pytest.mark.parametrize(
    "text",
    ['{"a": NaN}', '{"a": Infinity}', '{"a": 01}', "{,}", "{a=1}", '{"a": b}', '{"a" 1}', '{"a": f(1)}', "[1 2]"],
)
def test_what_is_no_literal_is_broken(text: str) -> None:
    assert read(text, [])[0] == "broken"
    assert as_json(text) is None


def test_numbers_and_nesting_are_bounded() -> None:
    assert read('{"a": ' + "1" * 5000 + "}", [])[0] == "broken"
    assert read('{"a": ' + "[" * 5000, [])[0] == "broken"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('{"a": [1, {"b": 2', '{"a": [1, {"b": 2}]}'),
        ('{"a": 1,', '{"a": 1}'),
        ("{", "{}"),
        ('{"a": "x', None),
        ('{"a":', None),
    ],
)
def test_brackets_that_lack_are_closed_and_nothing_else(text: str, written: str | None) -> None:
    reader = LiteralReader()
    reader.feed(text, is_last=True)
    assert reader.close() is (written is not None)
    assert written is None or reader.take() == written
