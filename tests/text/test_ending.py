"""Strings and expressions together end a text at the first of them, trimmed or kept, however the text is cut."""

from __future__ import annotations

import pytest

from serve_app.core.request import StopParams
from serve_app.text.stops import Ending

CASES = [
    # text, strings, patterns, trimmed, kept, matched
    ("one END two", ("END",), (), "one ", "one END", "END"),
    ("one 42 two", (), (r"\d\d",), "one ", "one 42", r"\d\d"),
    ("one 42 END", ("END",), (r"\d\d",), "one ", "one 42", r"\d\d"),
    ("one END 42", ("END",), (r"\d\d",), "one ", "one END", "END"),
    ("nothing of it", ("END",), (r"\d\d",), "nothing of it", "nothing of it", None),
    ("a false EN", ("END",), (r"\d\d",), "a false EN", "a false EN", None),
    ("ends 4", (), (r"\d$",), "ends ", "ends 4", r"\d$"),
]


def end(text: str, size: int, stop: StopParams) -> tuple[str, str | None]:
    ending = Ending(stop)
    shown = "".join(ending.feed(text[at : at + size]) for at in range(0, len(text), size))
    return shown + ending.flush(), ending.matched


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(("text", "strings", "patterns", "trimmed", "kept", "matched"), CASES)
def test_a_text_ends_at_the_first_of_its_stops(
    text: str, strings: tuple[str, ...], patterns: tuple[str, ...], trimmed: str, kept: str, matched: str | None,
    size: int,
) -> None:  # fmt: skip
    stop = StopParams(strings=strings, patterns=patterns)
    assert end(text, size, stop) == (trimmed, matched)
    showing = StopParams(strings=strings, patterns=patterns, shows_string=True, shows_pattern=True)
    assert end(text, size, showing) == (kept, matched)


def test_only_what_was_asked_for_is_kept() -> None:
    assert end("one END", 1, StopParams(strings=("END",), shows_pattern=True)) == ("one ", "END")
    assert end("one 42", 1, StopParams(patterns=(r"\d\d",), shows_string=True)) == ("one ", r"\d\d")


def test_the_end_of_a_text_is_where_it_has_grown_to_and_nothing_is_held_back() -> None:
    stop = StopParams(strings=(" END",), patterns=(r"\.\s*$",), shows_pattern=True)
    ending = Ending(stop)
    assert ending.feed("One. Two") == "One. Two"
    assert (ending.feed(". "), ending.matched) == ("", None)  # the blank may begin the stop string
    assert (ending.feed("EN"), ending.matched) == ("", None)
    assert (ending.feed("T. "), ending.matched) == (". ENT", None)
    assert (ending.feed(""), ending.matched) == ("", None)
    assert ending.flush() == ". "
    assert ending.matched == r"\.\s*$"
    ending = Ending(stop)
    assert (ending.feed("One."), ending.matched) == ("One.", r"\.\s*$")


def test_after_its_end_nothing_is_shown() -> None:
    ending = Ending(StopParams(strings=("END",)))
    assert ending.feed("one END two") == "one "
    assert (ending.feed("three"), ending.flush()) == ("", "")
