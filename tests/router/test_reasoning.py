"""What a model thinks is told from what it says, however its text is cut into pieces."""

from __future__ import annotations

import random

import pytest

from serve_app.router.reasoning import ReasoningSplitter, Split, is_thinking

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


def split(pieces: list[str], *, starts_thinking: bool) -> Split:
    splitter, found = ReasoningSplitter(is_thinking=starts_thinking), Split()
    for piece in pieces:
        found += splitter.feed(piece)
    return found + splitter.flush()


@pytest.mark.parametrize(("text", "starts_thinking", "reasoning", "content"), CASES)
def test_either_part_is_what_it_is_in_any_pieces(
    text: str, starts_thinking: bool, reasoning: str, content: str
) -> None:
    rng = random.Random(text)
    for _ in range(30):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(pieces, starts_thinking=starts_thinking) == Split(reasoning=reasoning, content=content), pieces
    assert split(list(text), starts_thinking=starts_thinking) == Split(reasoning=reasoning, content=content)


def test_a_piece_is_shown_as_soon_as_it_can_be_part_of_no_tag() -> None:
    splitter = ReasoningSplitter(is_thinking=False)
    fed = [splitter.feed(piece) for piece in ("<thi", "nk>", "ab", "c </", "b", "</think>", "\n", "d")]
    assert [(each.reasoning, each.content) for each in fed] == [
        ("", ""), ("", ""), ("ab", ""), ("c", ""), (" </b", ""), ("", ""), ("", ""), ("", "d"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "is_open"),
    [("<think>\n", True), ("a<think>b</think>", False), ("", False), ("</think><think>", True)],
)
def test_a_text_ends_in_a_thought_where_its_last_tag_opens_one(text: str, is_open: bool) -> None:
    assert is_thinking(text) is is_open
