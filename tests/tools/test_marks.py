"""Beginnings of marks at the end of a text, against the obvious search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.tools.marks import num_held, skip_space


@given(text=st.text("ab<", max_size=8), mark=st.text("ab<", min_size=1, max_size=5))
def test_the_longest_end_that_may_become_the_mark_is_held(text: str, mark: str) -> None:
    lengths = [length for length in range(1, min(len(text), len(mark) - 1) + 1) if mark.startswith(text[-length:])]
    assert num_held(text, mark) == max(lengths, default=0)


def test_white_space_is_that_of_json() -> None:
    assert skip_space(" \t\r\n\u00a0x", 0) == 4
    assert skip_space("ab", 2) == 2
