"""What is guessed: runs found again, followed, and trusted as far as they came true."""

from __future__ import annotations

import random
from array import array

import pytest

from serve_app.engine.speculation.speculator import (
    FADING,
    FIRST_CHANCES,
    MOST_SLOTS,
    PLAIN_EVERY,
    Guesser,
    Ngrams,
    StepCosts,
    Trust,
    level_of,
)


def latest(tokens: list[int], size: int) -> int | None:
    """By looking everywhere."""
    end = len(tokens)
    return next((at for at in range(end - 1, size - 1, -1) if tokens[at - size : at] == tokens[end - size :]), None)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_found_is_the_latest_place_of_the_same_run(size: int) -> None:
    generator = random.Random(size)
    tokens, ngrams, num_found, num_there = array("i"), Ngrams(size), 0, 0
    for _ in range(800):
        tokens.append(generator.randrange(12))
        ngrams.add(tokens, len(tokens) - 1)
        found, expected = ngrams.find(tokens), latest(tokens.tolist(), size) if len(tokens) >= size else None
        assert found is None or tokens[found - size : found] == tokens[-size:]
        num_found += found is not None and found == expected
        num_there += expected is not None
    assert num_found > 0.6 * num_there  # a slot may be another run's by then


def test_taking_all_at_once_is_taking_one_by_one() -> None:
    generator = random.Random(1)
    tokens = array("i", [generator.randrange(50) for _ in range(5000)])
    slowly, at_once = Ngrams(3), Ngrams(3)
    for end in range(len(tokens)):
        slowly.add(tokens, end)
    at_once.add(tokens, len(tokens) - 1)
    for _ in range(500):
        start = generator.randrange(4900)
        probe = tokens + tokens[start : start + 7]
        assert slowly.find(probe) == at_once.find(probe) or None in (slowly.find(probe), at_once.find(probe))


def test_memory_is_bounded_whatever_the_length() -> None:
    tokens = array("i", (place * 7919 % 50021 for place in range(300_000)))
    ngrams = Ngrams(2)
    ngrams.add(tokens, len(tokens) - 1)
    assert len(ngrams._ends) == MOST_SLOTS
    ngrams.add(tokens, len(tokens))
    assert ngrams.find(tokens) is None or ngrams.find(tokens) < len(tokens)


def guesser_of(prompt: list[int], generated: list[int] | None = None, prediction: tuple[int, ...] = ()) -> Guesser:
    guesser = Guesser(prediction, Trust(Trust()))
    guesser.catch_up([*prompt, *(generated or [])], len(prompt))
    return guesser


def test_what_followed_before_is_guessed_to_follow_again() -> None:
    assert guesser_of([1, 2, 3, 4, 5, 6, 7, 9, 3, 4]).guess(3) == (5, 6, 7)
    assert guesser_of([1, 2, 3]).guess(3) == ()


def test_a_longer_match_counts_for_more_than_a_later_one() -> None:
    assert guesser_of([1, 2, 3, 70, 5, 2, 3, 80, 1, 2, 3]).guess(1) == (70,)


def test_a_text_that_goes_round_in_circles_is_guessed_beyond_its_end() -> None:
    assert guesser_of([1, 2, 3, 1, 2, 3]).guess(8) == (1, 2, 3, 1, 2, 3, 1, 2)


def test_what_matches_is_followed_and_its_match_grows() -> None:
    guesser = guesser_of([1, 2, 3, 4, 5, 6, 7, 8, 2, 3])
    assert guesser.num_matched == 2
    guesser.catch_up([1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 5], 10)
    assert (guesser.num_matched, guesser.guess(2)) == (4, (6, 7))


def test_behind_one_token_that_differs_it_may_go_on_as_before() -> None:
    guesser = guesser_of([1, 2, 3, 4, 5, 6, 7, 8, 2, 3], [4, 99])
    assert (guesser.num_matched, guesser.guess(2)) == (0, (6, 7))
    guesser.catch_up([1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 99, 98], 10)
    assert guesser.guess(2) == ()


def test_a_prediction_is_followed_from_its_beginning_and_no_further_than_its_end() -> None:
    guesser = guesser_of([1, 2, 3], prediction=(50, 51, 52))
    assert guesser.is_prediction
    assert guesser.guess(9) == (50, 51, 52)
    guesser.catch_up([1, 2, 3, 50, 51, 52], 3)
    assert not guesser.is_prediction


def test_a_prediction_is_found_again_where_the_text_has_left_out_some_of_it() -> None:
    guesser = guesser_of([1, 2], [50, 51, 54, 55], prediction=(50, 51, 52, 53, 54, 55, 56, 57))
    assert guesser.guess(4) == (56, 57)


def test_guesses_are_trusted_as_far_as_they_came_true() -> None:
    shared = Trust()
    own, level = Trust(shared), level_of(20)
    assert own.chance(level) == pytest.approx(FIRST_CHANCES[level])
    for _ in range(40):
        own.note(level, is_hit=False)
    assert own.chance(level) < 0.1
    assert shared.chance(level) < FIRST_CHANCES[level] / 2  # who comes next begins with less
    for _ in range(60):
        own.note(level, is_hit=True)
    assert own.chance(level) > 0.9
    chances = own.chances(20, 5)
    assert list(chances) == sorted(chances, reverse=True)
    assert chances[1] == pytest.approx(own.chance(level) ** 2)


def test_the_price_of_a_guess_is_what_it_was_measured_to_be() -> None:
    costs = StepCosts()
    assert costs.plain_s(8) is None  # one without guesses has to be made first
    costs.note(8, 0, 0.100)
    for _ in range(30):
        costs.note(8, 6, 0.130)
        costs.note(8, 0, 0.100)
    assert costs.extra_s(8, 6) == pytest.approx(0.030)
    assert costs.extra_s(8, 3) == pytest.approx(0.015)  # of the nearest number seen
    costs.fade(8)
    assert costs.extra_s(8, 6) == pytest.approx(0.030 * FADING)
    assert costs.plain_s(1) is None


def test_steps_without_guesses_are_measured_again_now_and_then() -> None:
    costs = StepCosts()
    costs.note(1, 0, 0.1)
    for _ in range(PLAIN_EVERY):
        assert costs.plain_s(1) is not None
        costs.note(1, 4, 0.12)
    assert costs.plain_s(1) is None
    costs.note(1, 0, 0.1)
    assert costs.plain_s(1) is not None


def test_one_slow_step_does_not_make_guesses_dear() -> None:
    costs = StepCosts()
    costs.note(1, 0, 0.1)
    for _ in range(20):
        costs.note(1, 4, 0.11)
    costs.note(1, 4, 1.0)
    assert costs.extra_s(1, 4) < 0.3
    for _ in range(5):
        costs.note(1, 4, 0.11)
    assert costs.extra_s(1, 4) < 0.05
