"""Marks in a text that grows are found where they are in the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.tools.literals import MarkFinder

MARKS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4)


def found(marks: list[str], pieces: list[str]) -> list[str]:
    """What stands between marks, and the marks, in turns."""
    finder, buffer, parts = MarkFinder(marks), "", [""]
    for number, piece in enumerate(pieces, start=1):
        buffer += piece
        mark = "."
        while mark:
            at, mark = finder.find(buffer, is_last=number == len(pieces))
            parts[-1] += buffer[:at]
            parts += [mark, ""] if mark else []
            buffer = buffer[at + len(mark) :]
    return parts


@given(marks=MARKS, text=st.text("ab<", max_size=12))
def test_marks_are_the_same_however_a_text_comes(marks: list[str], text: str) -> None:
    parts = found(marks, [text])
    assert found(marks, [*text, ""]) == parts
    assert "".join(parts) == text
    assert all(mark not in said for mark in marks for said in parts[::2])
