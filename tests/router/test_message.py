"""What a model thinks is told from what it says in every form, however its text is cut into pieces."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from serve_app.core.tools import ReasoningParserName
from serve_app.router.message import (
    NONE,
    THINK,
    THOUGHTS,
    UNKNOWN,
    ReasoningSplitter,
    Split,
    ThoughtForm,
    thoughts_for,
)

CASES = [
    ("Hello", False, "", "Hello"),
    ("<think>\nwhy\n</think>\n\nHello", False, "why", "Hello"),
    ("  <think>why</think>Hello </think>", False, "why", "Hello </think>"),
    ("why\n</think>\n\nHello\n", True, "why", "Hello\n"),
    ("\n why not", True, "why not", ""),
    ("<think></think>Hello", False, "", "Hello"),
    ("<think>a < b </thin </think>\n c", False, "a < b </thin", "c"),
    ("say <think>no</think>", False, "", "say <think>no</think>"),
    ("<thi", False, "", "<thi"),
    ("<thinking>", False, "", "<thinking>"),
    ("a\n\nb </thi", True, "a\n\nb </thi", ""),
    (" ", False, "", " "),
    ("", True, "", ""),
]


HARMONY = "<|channel|>analysis<|message|>two<|end|><|start|>assistant<|channel|>final<|message|>4"
FORMS: list[tuple[ReasoningParserName, str]] = [
    ("harmony", HARMONY),
    ("openai_gptoss", HARMONY + "<|return|>"),
    ("harmony", HARMONY.replace("final", "commentary")),
    ("harmony", HARMONY.replace("final", "final <|constrain|>json")),
    ("mistral", "[THINK]two[/THINK]4"),
    ("gemma4", "<|channel>thought\ntwo\n<channel|>4"),
    ("seed_oss", "<seed:think>two</seed:think>\n4"),
    ("command_a", "<|START_THINKING|>two<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>"),
    ("granite", "Here is my thought process:\ntwo\n\nHere is my response:\n4"),
    ("granite", "Here's my thought process: two Here's my response: 4"),
    ("exaone", "<thought>\ntwo\n</thought>\n\n4"),
    ("hunyuan_a13b", "<think>\ntwo\n</think>\n<answer>\n4\n</answer>"),
    ("ernie45", "<think>two</think>\n\n<response>\n4\n</response>\n"),
    ("apriel", "Here are my reasoning steps:\ntwo\n[BEGIN FINAL RESPONSE]\n4\n[END FINAL RESPONSE]"),
    ("kimi", "◁think▷two◁/think▷4"),
    ("minicpm", "<|thought_start|>\ntwo\n<|thought_end|>\n4"),
    ("openthinker", "<|begin_of_thought|>two<|end_of_thought|>\n<|begin_of_solution|>4<|end_of_solution|>"),
    ("qwen3", "<think>\ntwo\n</think>\n\n4"),
    ("deepseek_r1", "two</think>4"),
    ("minimax_m2", "<think>\ntwo\n</think>\n\n4"),
]  # fmt: skip
ALONE = ("granite", "hunyuan_a13b", "ernie45", "apriel", "deepseek_r1")
"""These need their template or a setting: their thoughts do not begin with a mark, or marks stand around the rest."""


def split(pieces: list[str], form: ThoughtForm = THINK, *, before: str = "") -> Split:
    splitter, found = ReasoningSplitter(form, before=before), Split()
    for piece in pieces:
        found += splitter.feed(piece)
    return found + splitter.flush()


def split_alike(text: str, form: ThoughtForm, *, before: str = "") -> Split:
    """The split that every way to cut the text gives."""
    rng, whole = random.Random(text), split([text], form, before=before)
    for _ in range(30):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(pieces, form, before=before) == whole, pieces
    assert split(list(text), form, before=before) == whole
    return whole


@pytest.mark.parametrize(("text", "starts_thinking", "reasoning", "content"), CASES)
def test_either_part_is_what_it_is_in_any_pieces(
    text: str, starts_thinking: bool, reasoning: str, content: str
) -> None:
    found = split_alike(text, THINK, before="<think>" if starts_thinking else "")
    assert found == Split(reasoning=reasoning, content=content)


@pytest.mark.parametrize(("name", "text"), FORMS)
def test_every_form_is_read_by_its_name_and_by_itself_where_the_text_begins_with_its_mark(
    name: ReasoningParserName, text: str
) -> None:
    read = Split(reasoning="two", content="4")
    assert split_alike(text, THOUGHTS[name]) == read
    assert (split_alike(text, UNKNOWN) == read) is (name not in ALONE)
    assert split_alike(text, NONE) == Split(content=text)


@pytest.mark.parametrize("name", THOUGHTS)
def test_an_answer_without_thoughts_is_content(name: ReasoningParserName) -> None:
    if not THOUGHTS[name].begins:
        assert split_alike("4 < 5", THOUGHTS[name]) == Split(content="4 < 5")
    closed = "".join(THOUGHTS[name].closers[:1])
    assert split_alike("4 < 5", THOUGHTS[name], before=f"assistant{closed}\n") == Split(content="4 < 5")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("<|channel|>final<|message|>4", Split(content="4")),
        (HARMONY.partition("<|start|>")[0] + "<|start|>assistant" + HARMONY, Split(reasoning="two\ntwo", content="4")),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
            Split(content="<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"),
        ),
    ],
)
def test_messages_of_harmony_are_told_apart_and_calls_are_left_for_whoever_reads_them(text: str, read: Split) -> None:
    assert split_alike(text, THOUGHTS["harmony"]) == read


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<|START_THINKING|> then <|START_ACTION|>", "command_a"),
        ("'<|channel>thought\n' + thinking + '<channel|>'", "gemma4"),
        ("[THINK]{{ text }}[/THINK]", "mistral"),
        ("{%- set begin = '<seed:think>' -%}", "seed_oss"),
        ("Write your thoughts after 'Here is my thought process:'", "granite"),
        ("{{ '[BEGIN FINAL RESPONSE]' }}", "apriel"),
        ("<think>{{ thought }}</think><answer>", "hunyuan"),
        ("content.split('</think>')", "think"),
        ("{{ '<think>' }}", "think"),
    ],
)
def test_a_template_shows_how_its_model_thinks_and_a_setting_counts_more(
    template: str, name: ReasoningParserName
) -> None:
    assert thoughts_for(template) is THOUGHTS[name]
    assert thoughts_for(template, "kimi") is THOUGHTS["kimi"]


def test_every_name_that_an_operator_may_give_has_a_form() -> None:
    assert set(get_args(ReasoningParserName)) == set(THOUGHTS)


def test_a_piece_is_shown_as_soon_as_it_can_be_part_of_no_tag() -> None:
    splitter = ReasoningSplitter(THINK)
    fed = [splitter.feed(piece) for piece in ("<thi", "nk>", "ab", "c </", "b", "</think>", "\n", "d")]
    assert [(each.reasoning, each.content) for each in fed] == [
        ("", ""), ("", ""), ("ab", ""), ("c", ""), (" </b", ""), ("", ""), ("", ""), ("", "d"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "is_open"),
    [("<think>\n", True), ("a<think>b</think>", False), ("", False), ("</think><think>", True)],
)
def test_a_text_ends_in_a_thought_where_its_last_mark_opens_one(text: str, is_open: bool) -> None:
    assert THINK.is_open(text) is is_open
