"""Texts parted into content and calls: nothing lost, nothing doubled, and the same however a text is split."""

from __future__ import annotations

import json
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.tools import Tool, ToolCall, ToolParserName
from serve_app.tools.forms import FORMS, HERMES, JSON, LLAMA3, MISTRAL, UNKNOWN, Form
from serve_app.tools.parser import CallParser, parse_whole

SHARED = Path(__file__).parents[3] / "shared/cases/f08/calls.jsonl"
NAMES = ("get_weather", "f", "a.b:c/d-e")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [Tool(name=name, at=at, sent={}, parameters=CITY) for at, name in enumerate(NAMES)]
Calls = list[tuple[str, str]]


def numbered() -> Any:
    numbers = count()
    return lambda: f"id{next(numbers)}"


def streamed(form: Form, pieces: list[str], *, is_cut: bool = False) -> tuple[str, Calls]:
    """Content and calls, put together from the deltas as a client does."""
    parser = CallParser(form, TOOLS, new_id=numbered())
    content = ""
    calls: list[list[str]] = []
    for parsed in [*map(parser.feed, pieces), parser.flush(is_cut=is_cut)]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert (delta.index, delta.id) == (len(calls), f"id{len(calls)}")
                calls.append([delta.name, ""])
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    assert parser.num_calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


def whole(form: Form, text: str, *, is_cut: bool = False) -> tuple[str, Calls]:
    content, calls = parse_whole(form, text, TOOLS, new_id=numbered(), is_cut=is_cut)
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
    (JSON, f"```json\n{ONE_W}\n```", "", BOTH[:1]),
    # with parts left out
    (HERMES, ONE_W, "", BOTH[:1]),
    (HERMES, f"{ONE_W}\n</tool_call>", "", BOTH[:1]),
    (HERMES, f"<tool_call>[{ONE_W}, {ONE_F}]", "", BOTH),
    (HERMES, f"<tool_call>{ONE_W}\n{ONE_F}</tool_call>", "", BOTH),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", BOTH[1:]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1', "", [("f", '{"a": [1]}')]),
    (HERMES, "<tool_call>{'name': 'f', 'arguments': {'a': True, 'b': None,}}</tool_call>", "",
     [("f", '{"a": true, "b": null}')]),
    (HERMES, f'<tool_call>{{"type": "function", "function": {ONE_W}, "id": "1"}}</tool_call>', "", BOTH[:1]),
    (HERMES, '<tool_call>{"f": {}}</tool_call>', "", BOTH[1:]),
    (LLAMA3, f"<function=get_weather>{W}</function>", "", BOTH[:1]),
    (MISTRAL, f"get_weather[ARGS]{W}", "", BOTH[:1]),
    (MISTRAL, "[TOOL_CALLS]f", "", BOTH[1:]),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]", "", BOTH[1:]),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]{'a': 1}", "", [("f", '{"a": 1}')]),
]  # fmt: skip

CONTENT: list[tuple[Form, str]] = [
    (HERMES, "no call"),
    (HERMES, "a < b, <tool, <tool_cal"),
    (HERMES, f"So: {ONE_W}"),
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call>\n</tool_call>"),
    (HERMES, f"<tool_call>{ONE_W.replace('get_weather', 'unknown')}</tool_call>"),
    (HERMES, '{"name": "f"}'),
    (HERMES, '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "reason": 1, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HERMES, "<tool_call>{'name': 'g', 'arguments': {}}</tool_call>"),
    (HERMES, "<tool_call>f()</tool_call> <tool_call>"),
    (LLAMA3, f"Sure: {PAR_W}"),
    (LLAMA3, '{"name": "John", "parameters": {}}'),
    (LLAMA3, '{"name": "f", "age": 3}'),
    (LLAMA3, '<|python_tag|>brave_search.call(query="x")'),
    (LLAMA3, "{"),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MISTRAL, "[TOOL_CALLS]fo"),
    (MISTRAL, "[1, 2]"),
    (MISTRAL, "[TOOL"),
    (JSON, '{"a": 1}'),
    (JSON, "[]"),
    (JSON, f"text {ONE_W}"),
    (JSON, " \n"),
]

BROKEN: list[tuple[Form, str, str, str]] = [
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": maybe}}</tool_call>', '{"a": ', "maybe}}</tool_call>"),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "cut o', '{"a": "cut o', ""),
    (JSON, '[{"name": "f", "arguments": {"a": 1 2}}]', '{"a": 1 ', "2}}]"),
]
"""Begun as calls are and not ended so, with what is given of the arguments, and the content behind that."""
CUT: list[tuple[Form, str, str, Calls]] = [
    (HERMES, 'So <tool_call>{"name": "f", "argu', 'So <tool_call>{"name": "f", "argu', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": tr', "", [("f", '{"a": tr')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x\\', "", [("f", '{"a": "x\\\\')]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1', "", [("f", '{"a": 1')]),
    (MISTRAL, "[TOOL_CALLS]f", "[TOOL_CALLS]f", []),
    (FORMS["pythonic"], "[f(city='Ro", "", [("f", '{"city": "Ro')]),
    (FORMS["qwen3_coder"], "<tool_call><function=f><parameter=city>Ro", "", [("f", '{"city": "Ro')]),
    (FORMS["qwen3_coder"], "<tool_call><function=f><parameter=city>Ro</parameter><para", "", [("f", '{"city": "Ro"')]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_calls_are_read_whole_and_in_every_single_character(form: Form, text: str, content: str, calls: Calls) -> None:
    assert whole(form, text) == (content, calls)
    assert streamed(form, list(text)) == (content, calls)


@pytest.mark.parametrize(("form", "text"), CONTENT)
def test_what_is_no_call_is_content_to_the_letter(form: Form, text: str) -> None:
    assert whole(form, text) == (text, [])
    assert streamed(form, list(text)) == (text, [])


@pytest.mark.parametrize(("form", "text", "arguments", "content"), BROKEN)
def test_where_arguments_break_the_call_ends_and_the_rest_is_content(
    form: Form, text: str, arguments: str, content: str
) -> None:
    assert whole(form, text) == streamed(form, list(text)) == (content, [("f", arguments)])


@pytest.mark.parametrize(("form", "text", "content", "calls"), CUT)
def test_a_text_that_is_cut_has_the_same_calls_whole_and_streamed_and_none_is_completed(
    form: Form, text: str, content: str, calls: Calls
) -> None:
    assert whole(form, text, is_cut=True) == streamed(form, list(text), is_cut=True) == (content, calls)


R = '{"city": "Rome"}'
BARE = f'{{"name": "get_weather", "arguments": {R}}}'
FAMILIES: list[tuple[ToolParserName, str]] = [
    ("hermes", f"<tool_call>\n{BARE}\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
     "</tool_call>"),
    ("seed_oss", "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n</function>\n"
     "</seed:tool_call>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
     "</invoke>\n</minimax:tool_call>"),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
     '<｜DSML｜parameter name="city" string="true">'
     "Rome</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"),
    ("step3", '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
     '<steptml:parameter name="city">Rome</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
     "<｜tool_calls_end｜>"),
    ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"),
    ("glm47", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"),
    ("longcat", "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Rome"
     "</longcat_arg_value>\n</longcat_tool_call>"),
    ("hunyuan", f"<tool_calls><tool_call>function<tool_sep>get_weather\n```json\n{R}\n```</tool_call></tool_calls>"),
    ("jamba", f"<tool_calls>[\n{BARE}\n]</tool_calls>"),
    ("minimax", f"<tool_calls>\n{BARE}\n</tool_calls>"),
    ("mistral", f"[TOOL_CALLS] [{BARE}]"),
    ("mistral_named", f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{R}"),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{R}\n```"
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{R}"
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:12<|tool_call_argument_begin|>"
     f"{R}<|tool_call_end|><|tool_calls_section_end|>"),
    ("harmony", f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{R}<|call|>"),
    ("openai", f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{R}<|call|>"),
    ("llama3", f'<|python_tag|>{{"name": "get_weather", "parameters": {R}}}'),
    ("llama3_json", f"<function=get_weather>{R}</function>"),
    ("llama4", '<|python_start|>[get_weather(city="Rome")]<|python_end|>'),
    ("llama4_json", f'<|python_start|><|python_end|>{{"name": "get_weather", "parameters": {R}}}'),
    ("pythonic", "[get_weather(city='Rome')]"),
    ("olmo3", '<function_calls>\nget_weather(city="Rome")\n</function_calls>'),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Rome")]<|tool_call_end|>'),
    ("gemma3", '```tool_code\nprint(get_weather(city="Rome"))\n```'),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>Rome<escape>}<end_function_call>"),
    ("granite", f"<tool_call>[{BARE}]"),
    ("granite-20b-fc", f"<function_call> {BARE}"),
    ("phi4_mini", f"<|tool_call|>[{BARE}]<|/tool_call|>"),
    ("firefunction", f"functools[{BARE}]"),
    ("command_r", f'Action: ```json\n[\n{{"tool_name": "get_weather", "parameters": {R}}}\n]```'),
    ("command_a", f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {R}}}]'
     "<|END_ACTION|>"),
    ("internlm", f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {R}}}<|action_end|>'),
    ("nemotron", f"<TOOLCALL>[{BARE}]</TOOLCALL>"),
    ("apertus", f'<|tools_prefix|>[{{"get_weather": {R}}}]<|tools_suffix|>'),
    ("glm4", f"get_weather\n{R}"),
    ("functionary", f">>>get_weather\n{R}"),
    ("functionary", f"<|recipient|>get_weather\n<|content|>{R}"),
    ("react", f"Action: get_weather\nAction Input: {R}\nObservation:"),
    ("react", f"✿FUNCTION✿: get_weather\n✿ARGS✿: {R}\n✿RESULT✿"),
    ("xlam", f"```json\n[{BARE}]\n```"),
    ("gigachat3", f"function call<|role_sep|>\n{BARE}"),
    ("json", f"[{BARE}]"),
]  # fmt: skip
ONLY_NAMED = ("functionary", "react")
"""Their marks are words or characters that other texts have, too."""


@pytest.mark.parametrize(("name", "text"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_every_family_is_read_by_its_name_and_where_nothing_is_known(name: ToolParserName, text: str) -> None:
    for form in (FORMS[name], UNKNOWN)[: 1 if name in ONLY_NAMED else 2]:
        for before, behind in (("", ""), ("", "\n"), ("Let me see.\n", "")):
            if before and not any(
                mark in text for mark in form.head_marks + tuple(map(str.strip, form.openers)) if mark
            ):
                continue  # it is read at the beginning alone
            content, calls = whole(form, before + text + behind)
            assert (content, [(each, json.loads(arguments)) for each, arguments in calls]) == (
                before, [("get_weather", {"city": "Rome"})],
            )  # fmt: skip
            assert streamed(form, list(before + text + behind)) == (content, calls)


@pytest.mark.parametrize(("name", "text"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_a_call_of_nobody_is_content_to_the_letter(name: ToolParserName, text: str) -> None:
    other = text.replace("get_weather", "get_help")
    assert whole(FORMS[name], other) == streamed(FORMS[name], list(other)) == (other, [])


def test_a_section_of_calls_is_of_one_form_where_families_share_marks() -> None:
    call = "<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    text = f"<seed:tool_call>\n{call}{call}</seed:tool_call>"
    assert whole(UNKNOWN, text) == streamed(UNKNOWN, list(text)) == ("", [("f", R)] * 2)


def test_marks_that_are_special_tokens_are_no_content_where_these_are_not_shown() -> None:
    for form, text in (
        (MISTRAL, "Hi [TOOL_CALLS]x"),
        (FORMS["kimi_k2"], "<|tool_call_end|>Hi x<|tool_calls_section_end|>"),
    ):
        parser = CallParser(form, TOOLS, shows_marks=False)
        parts = [*map(parser.feed, text), parser.flush()]
        assert "".join(part.content for part in parts) == "Hi x"


@pytest.mark.skipif(not SHARED.exists(), reason="the texts are not here")
def test_canonical_texts_of_families_are_calls() -> None:
    texts = [json.loads(line)["text"] for line in SHARED.read_text().splitlines()]
    assert len(texts) > 20
    for text in texts:
        content, calls = whole(UNKNOWN, text)
        assert (content, [json.loads(each) for _, each in calls]) == ("", [{"city": "Rome"}]), text
        assert streamed(UNKNOWN, list(text)) == (content, calls)


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "<|py", "[TOOL_CALLS]", "[TOOL", "[ARGS]",
        "[CALL_ID]", "f", "get_weather", "unknown", ONE_W, ONE_F, PAR_W, PAR_F, '{"name": "f", "arguments": ',
        '{"name": "f"', W, F,
        "{", "}", "[", "]", ",", ";", " ", "\n", '"', "\\", "é", "text", '"id": 1', "1", "true", "f(", "city=", ")",
        *(text for _, text in FAMILIES), *(text[: len(text) // 2] for _, text in FAMILIES),
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)
CUTS = st.lists(st.integers(0), max_size=12)
ANY_FORM = st.sampled_from([HERMES, LLAMA3, MISTRAL, JSON])
EVERY_FORM = st.sampled_from([*dict.fromkeys(FORMS.values()), UNKNOWN])


@pytest.mark.law("Calls")
@settings(max_examples=300, deadline=None)
@given(form=EVERY_FORM, text=TEXTS, cuts=CUTS, is_cut=st.booleans())
def test_every_split_of_a_text_is_read_alike(form: Form, text: str, cuts: list[int], is_cut: bool) -> None:
    assert streamed(form, split(text, cuts), is_cut=is_cut) == streamed(form, [text], is_cut=is_cut)
    assert whole(form, text, is_cut=is_cut) == streamed(form, [text], is_cut=is_cut)


@settings(max_examples=300, deadline=None)
@given(form=EVERY_FORM, text=TEXTS)
def test_content_keeps_its_order_and_only_a_text_with_calls_loses_anything(form: Form, text: str) -> None:
    content, calls = streamed(form, list(text))
    rest = iter(text)
    assert all(character in rest for character in content)
    assert calls or content == text


SEGMENTS = st.lists(st.text("ab<|[_tT", min_size=1, max_size=6) | st.sampled_from([W, F]), max_size=7)


@pytest.mark.law("Calls")
@settings(max_examples=300, deadline=None)
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


@settings(max_examples=200, deadline=None)
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


def test_arguments_come_in_pieces_as_they_are_written() -> None:
    parser = CallParser(HERMES, TOOLS)
    parser.feed('<tool_call>{"name": "f", "arguments": ')
    pieces = [parser.feed(piece) for piece in ('{"a"', ': "b', 'c"}', "}</tool_call>")]
    assert [[call.arguments for call in parsed.calls] for parsed in pieces] == [["", '{"a"'], [': "b'], ['c"}'], []]


def test_a_head_without_end_is_content_and_not_looked_at_for_ever() -> None:
    text = '<tool_call>{"arguments": {"a": "' + "x" * 10_000
    parser, content = CallParser(HERMES, TOOLS), ""
    for start in range(0, len(text), 100):
        content += parser.feed(text[start : start + 100]).content
        assert len(text[: start + 100]) - len(content) <= 4096 + 100
    assert content + parser.flush().content == text


def test_every_form_is_found_by_its_name() -> None:
    assert {form.name for form in FORMS.values()} <= set(FORMS)
