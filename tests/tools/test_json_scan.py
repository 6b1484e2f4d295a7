"""The scanner of JSON against the standard library's reader."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.tools.json_scan import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
NEAR_JSON = st.text('{}[]":,\\ue019-+.truefalsn\n', max_size=14).map(lambda text: "{" + text)


def scanned(text: str, cuts: list[int]) -> tuple[str, str]:
    """How it ends, and what it took, fed in these pieces."""
    scanner, taken = JsonScanner(), ""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        piece = text[start:end]
        taken += piece[: scanner.feed(piece)]
        if scanner.state != "open":
            break
    return scanner.state, taken


def as_read(text: str) -> str | None:
    """The object at the beginning, as the standard library delimits it."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None
    return text[:end]


@settings(max_examples=300, deadline=None)
@given(value=OBJECTS, indent=st.none() | st.integers(0, 3), behind=st.text(max_size=5), cuts=st.lists(st.integers(0)))
def test_an_object_ends_where_it_does_however_it_is_cut(
    value: dict[str, object], indent: int | None, behind: str, cuts: list[int]
) -> None:
    written = json.dumps(value, indent=indent)
    assert scanned(written + behind, cuts) == ("complete", written)


@settings(max_examples=1000, deadline=None)
@given(text=NEAR_JSON, cuts=st.lists(st.integers(0), max_size=5))
def test_it_takes_exactly_what_the_standard_library_reads(text: str, cuts: list[int]) -> None:
    state, taken = scanned(text, cuts)
    if "NaN" in text or "Infinity" in text:
        return
    if state == "complete":
        assert as_read(text) == taken
    else:
        assert as_read(text) is None
    assert (state, taken) == scanned(text, [])


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": Infinity}', "{'a': 1}", '{"a": 01}', '{"a": 1,}', '{"a": True}', '{"a": "\n"}', "{,}"]
)
def test_what_is_nearly_json_is_broken(text: str) -> None:
    assert scanned(text, [])[0] == "broken"


def test_numbers_and_nesting_are_bounded() -> None:
    assert scanned('{"a": ' + "1" * 5000 + "}", [])[0] == "broken"
    assert scanned('{"a": ' + "[" * 5000, [])[0] == "broken"
