"""Texts parted into content and calls: nothing lost, nothing doubled, and the same however a text is split."""

from __future__ import annotations

import json
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.tools import Tool, ToolCall
from serve_app.tools.forms import FORMS, HERMES, JSON, LLAMA3, MISTRAL, Form
from serve_app.tools.parser import ToolCallParser
from serve_app.tools.whole import parse_whole

NAMES = ("get_weather", "f", "a.b:c/d-e")
Calls = list[tuple[str, str]]


def numbered() -> Any:
    numbers = count()
    return lambda: f"id{next(numbers)}"


def streamed(form: Form, pieces: list[str]) -> tuple[str, Calls]:
    """Content and calls, put together from the deltas as a client does."""
    parser = ToolCallParser(form, NAMES, new_id=numbered())
    content = ""
    calls: list[list[str]] = []
    for parsed in [*map(parser.feed, pieces), parser.flush()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert (delta.index, delta.id) == (len(calls), f"id{len(calls)}")
                calls.append([delta.name, ""])
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    assert parser.num_calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


def whole(form: Form, text: str) -> tuple[str, Calls]:
    content, calls = parse_whole(
        form, text, [Tool(name=name, at=at, sent={}) for at, name in enumerate(NAMES)], new_id=numbered()
    )
    assert calls == tuple(
        ToolCall(id=f"id{at}", name=call.name, arguments=call.arguments) for at, call in enumerate(calls)
    )
    return content, [(call.name, call.arguments) for call in calls]


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


W, F = '{"city": "Paris", "n": [1, 2.5e3, {"x": null}]}', "{}"
ONE_W, ONE_F = f'{{"name": "get_weather", "arguments": {W}}}', f'{{"name": "f", "arguments": {F}}}'
PAR_W, PAR_F = f'{{"name": "get_weather", "parameters": {W}}}', f'{{"name": "f", "parameters": {F}}}'
BOTH = [("get_weather", W), ("f", F)]

READ: list[tuple[Form, str, str, Calls]] = [
    (HERMES, f"<tool_call>\n{ONE_W}\n</tool_call>", "", BOTH[:1]),
    (HERMES, f"See.\n<tool_call>\n{ONE_W}\n</tool_call>\n<tool_call>{ONE_F}</tool_call>\n", "See.\n", BOTH),
    (HERMES, f"<tool_call>{ONE_W}</tool_call> Done. ", " Done. ", BOTH[:1]),
    (HERMES, f"<tool_call>\n{ONE_W}\n", "", BOTH[:1]),  # the closing mark was cut off
    (HERMES, f"<tool_call>{ONE_W}\n<tool_call>{ONE_F}", "", BOTH),
    (HERMES, f"<tool_call>{ONE_W} and</tool_call>", " and</tool_call>", BOTH[:1]),
    (HERMES, f'<tool_call>{{"arguments": {W}, "id": 5, "name": "get_weather"}}</tool_call>', "", BOTH[:1]),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {F}, "type": "function"}}</tool_call>', "", BOTH[1:]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", BOTH[1:]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", BOTH[1:]),
    (HERMES, f"<tool_call><tool_call>{ONE_F}</tool_call>", "<tool_call>", BOTH[1:]),
    (LLAMA3, PAR_W, "", BOTH[:1]),
    (LLAMA3, f"\n {PAR_W}; {PAR_F}", "", BOTH),
    (LLAMA3, f"<|python_tag|>{PAR_W}", "", BOTH[:1]),
    (LLAMA3, f"Sure. <|python_tag|>{PAR_W}; {PAR_F}", "Sure. ", BOTH),
    (LLAMA3, f'{{"type": "function", "name": "f", "parameters": {F}}}', "", BOTH[1:]),
    (LLAMA3, f"{PAR_W}; and", "; and", BOTH[:1]),
    (MISTRAL, f"[TOOL_CALLS][{ONE_W}, {ONE_F}]", "", BOTH),
    (MISTRAL, f"[TOOL_CALLS] [{ONE_W}]", "", BOTH[:1]),
    (MISTRAL, f"Sure.[TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]f[ARGS]{F}", "Sure.", BOTH),
    (MISTRAL, f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{W}", "", BOTH[:1]),
    (MISTRAL, f"[TOOL_CALLS]get_weather{W}", "", BOTH[:1]),
    (MISTRAL, f"[TOOL_CALLS]{ONE_W}", "", BOTH[:1]),
    (MISTRAL, f"[{ONE_W},{ONE_F}]", "", BOTH),
    (JSON, ONE_W, "", BOTH[:1]),
    (JSON, f" [{ONE_W}, {ONE_F}] ", "", BOTH),
    (JSON, f"{ONE_W} and more", " and more", BOTH[:1]),
]  # fmt: skip

CONTENT: list[tuple[Form, str]] = [
    (HERMES, "no call"),
    (HERMES, "a < b, <tool, <tool_cal"),
    (HERMES, f"{ONE_W}"),
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call>\n</tool_call>"),
    (HERMES, f"<tool_call>{ONE_W.replace('get_weather', 'unknown')}</tool_call>"),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "reason": 1, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    (HERMES, "<tool_call>f()</tool_call> <tool_call>"),
    (LLAMA3, f"Sure: {PAR_W}"),
    (LLAMA3, '{"name": "John", "parameters": {}}'),
    (LLAMA3, '{"name": "f", "age": 3}'),
    (LLAMA3, '<|python_tag|>brave_search.call(query="x")'),
    (LLAMA3, "{"),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]"),
    (MISTRAL, "[1, 2]"),
    (MISTRAL, "[TOOL"),
    (JSON, '{"a": 1}'),
    (JSON, "[]"),
    (JSON, f"text {ONE_W}"),
    (JSON, " \n"),
]

BROKEN: list[tuple[Form, str, str]] = [
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>', '{"a": '),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "cut o', '{"a": "cut o'),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1', '{"a": 1'),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]{'a': 1}", "{"),
    (JSON, '[{"name": "f", "arguments": {"a": 1,}}]', '{"a": 1,'),
]
"""Begun as calls are and not ended so, with what a stream has given of the arguments by then."""


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_calls_are_read_whole_and_in_every_single_character(form: Form, text: str, content: str, calls: Calls) -> None:
    assert whole(form, text) == (content, calls)
    assert streamed(form, list(text)) == (content, calls)


@pytest.mark.parametrize(("form", "text"), CONTENT)
def test_what_is_no_call_is_content_to_the_letter(form: Form, text: str) -> None:
    assert whole(form, text) == (text, [])
    assert streamed(form, list(text)) == (text, [])


@pytest.mark.parametrize(("form", "text", "given_until_then"), BROKEN)
def test_a_call_that_breaks_is_content_where_nothing_was_given_yet(
    form: Form, text: str, given_until_then: str
) -> None:
    """And in a stream, which has given its beginning, what follows that is."""
    assert whole(form, text) == (text, [])
    content, calls = streamed(form, list(text))
    assert calls == [("f", given_until_then)]
    assert text.endswith(given_until_then + content)


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "<|py", "[TOOL_CALLS]", "[TOOL", "[ARGS]",
        "[CALL_ID]", "f", "get_weather", "unknown", ONE_W, ONE_F, PAR_W, PAR_F, '{"name": "f", "arguments": ',
        '{"name": "f"', W, F,
        "{", "}", "[", "]", ",", ";", " ", "\n", '"', "\\", "é", "text", '"id": 1', "1", "true",
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)
CUTS = st.lists(st.integers(0), max_size=12)
ANY_FORM = st.sampled_from([HERMES, LLAMA3, MISTRAL, JSON])


@settings(max_examples=600, deadline=None)
@given(form=ANY_FORM, text=TEXTS, cuts=CUTS)
def test_every_split_of_a_text_is_read_alike(form: Form, text: str, cuts: list[int]) -> None:
    assert streamed(form, split(text, cuts)) == streamed(form, [text])


@settings(max_examples=600, deadline=None)
@given(form=ANY_FORM, text=TEXTS)
def test_content_keeps_its_order_and_only_a_text_with_calls_loses_anything(form: Form, text: str) -> None:
    for content, calls in (streamed(form, list(text)), whole(form, text)):
        rest = iter(text)
        assert all(character in rest for character in content)
        assert calls or content == text
    assert all(is_object(arguments) for _, arguments in calls)


SEGMENTS = st.lists(st.text("ab<|[_tT", min_size=1, max_size=6) | st.sampled_from([W, F]), max_size=7)


@settings(max_examples=600, deadline=None)
@given(form=st.sampled_from([HERMES, MISTRAL]), segments=SEGMENTS, cuts=CUTS)
def test_no_character_between_calls_is_lost_doubled_or_moved(form: Form, segments: list[str], cuts: list[int]) -> None:
    """Texts of content and calls in any order, of which each side is known."""
    before, behind = "[TOOL_CALLS]f[ARGS]", ""
    if form is HERMES:
        before, behind = '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"
    text = "".join(f"{before}{each}{behind}" if each in (W, F) else each for each in segments)
    content = "".join(each for each in segments if each not in (W, F))
    calls = [("f", each) for each in segments if each in (W, F)]
    assert streamed(form, split(text, cuts)) == whole(form, text) == (content, calls)


@settings(max_examples=400, deadline=None)
@given(
    form=ANY_FORM,
    before=st.text("ab <|[_t\n", max_size=8),
    arguments=st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=6), max_size=3), min_size=1, max_size=3),
    indent=st.none() | st.integers(0, 2),
    cuts=CUTS,
)
def test_what_is_written_as_a_family_writes_it_is_read_back(
    form: Form, before: str, arguments: list[dict[str, str]], indent: int | None, cuts: list[int]
) -> None:
    written = [json.dumps(each, indent=indent) for each in arguments]
    objects = [json.dumps({"name": "f", form.arguments: 0})[:-2] + each + "}" for each in written]
    text = {
        "hermes": before + "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects),
        "llama3": before + "<|python_tag|>" + "; ".join(objects),
        "mistral": before + "".join(f"[TOOL_CALLS]f[ARGS]{each}" for each in written),
        "json": "[" + ", ".join(objects) + "]",
    }[form.name]
    content = "" if form is JSON else before
    assert streamed(form, split(text, cuts)) == whole(form, text) == (content, [("f", each) for each in written])


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def test_arguments_come_in_pieces_as_they_are_written() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    parser.feed('<tool_call>{"name": "f", "arguments": ')
    pieces = [parser.feed(piece) for piece in ('{"a"', ': "b', 'c"}', "}</tool_call>")]
    assert [[call.arguments for call in parsed.calls] for parsed in pieces] == [["", '{"a"'], [': "b'], ['c"}'], []]


def test_a_head_without_end_is_content_and_not_looked_at_for_ever() -> None:
    text = '<tool_call>{"arguments": {"a": "' + "x" * 10_000
    parser, content = ToolCallParser(HERMES, NAMES), ""
    for start in range(0, len(text), 100):
        content += parser.feed(text[start : start + 100]).content
        assert len(text[: start + 100]) - len(content) <= 4096 + 100
    assert content + parser.flush().content == text


def test_every_form_is_found_by_its_name() -> None:
    assert {form.name for form in FORMS.values()} <= set(FORMS)
