"""Events are counted whatever pieces they come in; quantiles, rounds, medians and ratios are what they say."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.figures import medians, quantile, ratios, round_figures, table
from benchmarks.load import Answer, Events, read_usage


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


STREAM = b"".join(
    [event("one"), event(" two"), event(""), event(" three"), b": ping\n\n",
     b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4}}\n\n', b"data: [DONE]\n\n"]
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_events_with_text_are_counted_however_a_stream_is_cut(seed: int) -> None:
    draw, events, at, counted = random.Random(seed), Events(), 0, 0
    while at < len(STREAM):
        step = draw.randrange(1, 40)
        counted += events.add(STREAM[at : at + step])
        at += step
    assert (counted, events.num_texts) == (3, 3)
    answer = Answer(0.0)
    for data in events.last:
        read_usage(answer, json.loads(data))
    assert (answer.prompt_tokens, answer.output_tokens) == (5, 4)


def test_an_error_within_a_stream_is_one() -> None:
    answer = Answer(0.0)
    read_usage(answer, {"error": {"message": "no"}})
    assert answer.error is not None


@pytest.mark.parametrize(
    ("percent", "value"), [(50, 2.0), (99, 4.0), (1, 1.0), (75, 3.0)]
)  # nearest rank of four values
def test_a_quantile_is_a_value_that_was_measured(percent: float, value: float) -> None:
    assert quantile([3.0, 1.0, 4.0, 2.0], percent) == value
    assert quantile([], percent) is None


def answer(sent: float, seen: list[float], ended: float, tokens: int, error: str | None = None) -> Answer:
    return Answer(sent, ended, seen, prompt_tokens=10, output_tokens=tokens, error=error)


def test_a_round_counts_tokens_of_good_answers_over_the_whole_time() -> None:
    told = round_figures(
        [answer(0.0, [1.0, 1.5, 2.5], 2.5, 3), answer(0.5, [1.0], 1.0, 1), answer(0.0, [], 4.0, 99, error="500")]
    )
    assert told["errors"] == 1
    assert told["output_tokens_per_s"] == 4 / 4.0
    assert told["total_tokens_per_s"] == 24 / 4.0
    assert (told["first_token_p50_ms"], told["first_token_p99_ms"]) == (500, 1000)
    assert (told["gap_p50_ms"], told["gap_p99_ms"]) == (500, 1000)


def test_nothing_streamed_has_no_times_of_tokens() -> None:
    told = round_figures([answer(0.0, [], 2.0, 8)])
    assert told["first_token_p50_ms"] is None
    assert told["gap_p50_ms"] is None


def test_medians_leave_out_what_a_round_lacks_and_add_up_errors() -> None:
    told = medians(
        [{"a": 1.0, "b": None, "errors": 1}, {"a": 9.0, "b": 2.0, "errors": 2}, {"a": 3.0, "b": None, "errors": 0}]
    )
    assert told == {"a": 3.0, "b": 2.0, "errors": 3}


def test_ratios_are_multiples_of_the_other_and_none_of_nothing() -> None:
    assert ratios({"a": 3.0, "b": 1.0, "c": None}, {"a": 2.0, "b": 0, "c": 1.0}) == {"a": 1.5, "b": None, "c": None}


def test_a_table_is_aligned_and_shows_what_is_missing() -> None:
    assert table([{"a": 1.23456, "b": "x"}, {"a": 1234.5}], ("a", "b")) == "   a  b\n1.23  x\n1234  -"
