"""The same caller gets the same variant, each gets as many as its weight says, and changed weights move no one else."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.catalog.aliases import in_order, share_of

CALLERS = [f"user-{number}" for number in range(20_000)]
WEIGHTS = st.dictionaries(
    st.sampled_from(["demo", "demo:sql@1", "demo:sql@2", "plain"]), st.floats(0.5, 100), min_size=2, max_size=4
)


def test_a_share_is_a_number_below_1_that_its_words_alone_decide() -> None:
    assert share_of("prod", "acme", "ann") == share_of("prod", "acme", "ann")
    assert len({share_of(*words) for words in (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"))}) == 5
    assert all(0 <= share_of(caller) < 1 for caller in CALLERS)
    assert sum(share_of("x", caller) < 0.05 for caller in CALLERS) == pytest.approx(1000, abs=150)


def test_each_variant_comes_first_as_often_as_its_weight_says() -> None:
    weights = {"a": 95, "b": 4, "c": 1}
    first = Counter(in_order(weights, "prod", caller)[0] for caller in CALLERS)
    for name, weight in weights.items():
        assert first[name] / len(CALLERS) == pytest.approx(weight / 100, abs=0.01)


def test_if_the_first_is_gone_the_others_share_its_callers_by_their_weights() -> None:
    second = Counter(order[1] for caller in CALLERS if (order := in_order({"a": 8, "b": 1, "c": 1}, caller))[0] == "a")
    assert second["b"] / second.total() == pytest.approx(0.5, abs=0.02)


def test_what_has_no_weight_is_never_drawn() -> None:
    assert in_order({"a": 0, "b": 1e-300, "c": 0}, "prod") == ["b"]


def test_what_is_drawn_for_one_name_says_nothing_of_another() -> None:
    both = Counter(
        (in_order({"a": 1, "b": 1}, "x", each)[0], in_order({"a": 1, "b": 1}, "y", each)[0]) for each in CALLERS
    )
    assert all(count / len(CALLERS) == pytest.approx(0.25, abs=0.02) for count in both.values())


def test_from_95_to_90_move_those_alone_who_must() -> None:
    old, new = ({"a": 100 - share, "b": share} for share in (5, 10))
    moved = Counter((in_order(old, each)[0], in_order(new, each)[0]) for each in CALLERS)
    assert moved["b", "a"] == 0
    assert moved["a", "b"] / len(CALLERS) == pytest.approx(0.05, abs=0.01)


@given(old=WEIGHTS, grown=st.floats(0.1, 10), at=st.integers(0, 3), caller=st.text(max_size=20))
def test_whoever_moves_goes_to_what_grew_more(old: dict[str, float], grown: float, at: int, caller: str) -> None:
    name = list(old)[at % len(old)]
    new = dict(reversed((old | {name: old[name] * grown}).items()))
    before, after = in_order(old, caller)[0], in_order(new, caller)[0]
    if before != after:
        assert (after if grown > 1 else before) == name
