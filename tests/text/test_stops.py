"""The stop matcher against an obvious search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.stops import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4).map(tuple)
PIECES = st.lists(st.text("abc", max_size=5), max_size=10)


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The obvious way: the earliest place; of stops at the same place the shortest."""
    found = min(((text.find(stop), len(stop), stop) for stop in stops if stop in text), default=None)
    return (text, None) if found is None else (text[: found[0]], found[2])


def run(matcher: StopMatcher, pieces: list[str]) -> list[str]:
    return [*(matcher.feed(piece) for piece in pieces), matcher.flush()]


@pytest.mark.slow
@settings(max_examples=700, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_all_that_is_shown_is_the_text_before_the_earliest_stop(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert ("".join(run(matcher, pieces)), matcher.matched) == cut("".join(pieces), stops)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_exactly_what_every_continuation_would_show_is_shown_at_once(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher, taken, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        taken += piece
        shown += matcher.feed(piece)
        # What could come next and matter: nothing, or the rest of a stop.
        continuations = ["", *(stop[i:] for stop in stops for i in range(1, len(stop)))]
        certain = min((cut(taken + more, stops)[0] for more in continuations), key=len)
        assert shown == certain[: len(taken)]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_a_match_is_reported_as_soon_as_no_continuation_can_change_it(
    stops: tuple[str, ...], pieces: list[str]
) -> None:
    matcher, taken = StopMatcher(stops), ""
    for piece in pieces:
        taken += piece
        matcher.feed(piece)
        text, stop = cut(taken, stops)
        continuations = [stop[i:] for stop in stops for i in range(1, len(stop))]
        is_certain = stop is not None and all(cut(taken + more, stops) == (text, stop) for more in continuations)
        assert (matcher.matched is not None) == is_certain


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (("END",), ["one E", "ND tail"], ["one ", "", ""], "END"),  # split across tokens: nothing of it is shown
        (("END",), ["one E", "X"], ["one ", "EX", ""], None),  # a false start is given back
        (("END",), ["one E"], ["one ", "E"], None),  # a beginning at the end is text
        (("bc", "abcd"), ["abc", "d"], ["", "", ""], "abcd"),  # the one that began earlier is waited for
        (("bc", "abcd"), ["abc", "x"], ["", "a", ""], "bc"),
        (("bc", "abcd"), ["abc"], ["", "a"], "bc"),  # and the wait ends with the text
        (("ab", "abc"), ["abc"], ["", ""], "ab"),
        (("aab",), ["aaa", "ab"], ["a", "a", ""], "aab"),
        (("🙂!",), ["é🙂", "!"], ["é", "", ""], "🙂!"),
        ((), ["any", "thing"], ["any", "thing", ""], None),
    ],
)
def test_stop_matcher_shows_all_before_the_stop_and_nothing_of_it(
    stops: tuple[str, ...], pieces: list[str], shown: list[str], matched: str | None
) -> None:
    matcher = StopMatcher(stops)
    assert run(matcher, pieces) == shown
    assert matcher.matched == matched


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(("x",))
    assert [matcher.feed("ax"), matcher.feed("more"), matcher.flush()] == ["a", "", ""]


def test_a_long_run_of_a_prefix_takes_a_bounded_number_of_comparisons_per_character() -> None:
    class CountingString(str):
        num_comparisons = 0
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            CountingString.num_comparisons += 1
            return str.__eq__(self, other)

        def __ne__(self, other: object) -> bool:
            CountingString.num_comparisons += 1
            return str.__ne__(self, other)

    num_characters = 5000
    matcher = StopMatcher(("a" * 2000 + "b",))
    for i in range(num_characters):
        matcher._stops[0].advance(CountingString("c" if i % 1999 == 1998 else "a"))
    assert CountingString.num_comparisons <= 4 * num_characters
