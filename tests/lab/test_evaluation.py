"""Intervals, tests and figures say of rows what is true of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy
import pandas
import pytest

from serve_app.lab import evaluation
from serve_app.lab.completion import Completion
from serve_app.lab.evaluation import MAX_EXACT, compare_paired, evaluated, examples_of, interval, permutation_p
from serve_app.lab.markup import Token


def grid_of(texts: Mapping[str, Sequence[str | None]]) -> pandas.DataFrame:
    """A grid by model: the text for each of the prompts `0`, `1`, …; None where it failed."""
    rows = [
        {"prompt": str(at), "model": model, "seed": at, "text": text, "error": "Failed." if text is None else None}
        for model, column in texts.items()
        for at, text in enumerate(column)
    ]
    frame = pandas.DataFrame({**pandas.DataFrame(rows), "seconds": [0.1 * at for at in range(len(rows))]})
    return frame.rename_axis("id")


def completion(*tokens: str) -> Completion:
    parts = tuple(Token(text=text, logprob=-1.0) for text in tokens)
    return Completion(index=0, prompt="", model="a", text="".join(tokens), finish_reason="stop", tokens=parts)


def right(row: Mapping[str, Any]) -> float:
    return row["text"] == row["answer"]


DATASET = [{"prompt": str(at), "answer": "y"} for at in range(8)]
TEXTS = {"a": "yyyyyyyn", "b": "nnnnnnnn", "c": "yyyyyyy"}


@pytest.fixture(scope="module")
def result() -> evaluation.Evaluation:
    texts = {model: [*column, None][:8] for model, column in TEXTS.items()}
    return evaluated(grid_of(texts), examples_of(DATASET, right, ["text"]), right)


def test_a_summary_has_the_mean_of_each_model_over_what_did_not_fail(result: evaluation.Evaluation) -> None:
    summary = result.summary()
    assert list(summary.index) == list(TEXTS)
    assert list(summary["mean"]) == [7 / 8, 0, 1]
    assert list(summary["prompts"]) == [8, 8, 7]
    assert list(summary["failed"]) == [0, 0, 1]
    assert (summary["low"] <= summary["mean"]).all()
    assert (summary["high"] >= summary["mean"]).all()
    assert summary.loc["a", "low"] < summary.loc["a", "mean"] < summary.loc["a", "high"]
    assert "<table" in result._repr_html_()


def test_two_models_are_compared_on_the_prompts_that_both_answered(result: evaluation.Evaluation) -> None:
    assert dict(compare_paired(result.frame, "a", "b", result.metric))["difference"] == 7 / 8
    assert compare_paired(result.frame, "a", "b", result.metric)["p"] == 2 / 2**7
    assert compare_paired(result.frame, "b", "a", result.metric)["difference"] == -7 / 8
    same = compare_paired(result.frame, "a", "c", result.metric)
    assert (same["difference"], same["p"], same["prompts"]) == (0, 1, 7)
    with pytest.raises(ValueError, match="none of 'd'"):
        compare_paired(result.frame, "a", "d", result.metric)


def test_several_completions_of_a_prompt_count_as_one() -> None:
    """Else a hundred copies of one observation would make it certain."""
    frame = pandas.concat([grid_of({"a": "y", "b": "n"})] * 100)
    frame["right"] = frame["text"] == "y"
    assert dict(compare_paired(frame, "a", "b", "right"))["p"] == 1.0


def test_a_dataset_has_prompts_and_no_column_of_a_grid() -> None:
    with pytest.raises(ValueError, match="found question"):
        examples_of([{"question": "?"}], len, ["text"])
    with pytest.raises(ValueError, match="found text"):
        examples_of([{"prompt": "?", "text": "!"}], len, ["prompt", "text"])
    with pytest.raises(ValueError, match="each prompt once; found again: '\\?'"):
        examples_of([{"prompt": "?"}, {"prompt": "?"}], len, [])
    for taken, metric in (("len", len), ("right", partial(len))):
        with pytest.raises(ValueError, match='"metric" must be a function'):
            examples_of([{"prompt": "?", taken: 1}], metric, [])


def test_p_of_random_signs_is_near_that_of_all_of_them() -> None:
    differences = numpy.random.default_rng(1).normal(0.2, 1, MAX_EXACT)
    exact = permutation_p(differences)
    random = permutation_p(numpy.append(differences, 0.0))  # a zero adds nothing and makes signs too many to try
    assert 0.02 < exact < 0.98
    assert random == pytest.approx(exact, abs=0.03)


@pytest.mark.parametrize("unit", [1e-15, 1 / 3, 7e5 / 3, 1e12])
def test_p_is_the_same_in_every_unit(unit: float) -> None:
    """Sums that are alike but for rounding are alike."""
    differences = numpy.array([0.1, 0.2, -0.3, 0.1, 0.3, -0.1, 0.2, 0.2, 0.3, -0.2])
    assert permutation_p(unit * differences) == permutation_p(differences) == 0.314453125  # so scipy


def test_p_is_small_for_what_is_alike_everywhere_and_large_for_what_cancels_out() -> None:
    assert permutation_p(numpy.ones(50)) == pytest.approx(1 / 10_001)
    assert permutation_p(numpy.array([1.0, -1.0] * 25)) == 1.0
    assert permutation_p(numpy.array([])) == 1.0


def test_an_interval_is_about_two_standard_errors_to_each_side() -> None:
    values = numpy.random.default_rng(2).normal(3, 1, 400)
    low, high = interval(values)
    assert (low, high) == interval(values)
    assert high - low == pytest.approx(4 * 1 / 20, rel=0.15)
    assert low < 3 < high
    assert numpy.isnan(interval(numpy.array([]))).all()


def test_a_figure_shows_of_each_two_models_how_often_one_wins_and_how_often_they_agree(
    result: evaluation.Evaluation,
) -> None:
    mpl.use("agg")
    from serve_app.lab import figures

    for figure, said in (
        (figures.win_rates(result.frame, "right"), {("a", "b"): "94%", ("b", "a"): "6%", ("a", "c"): "50%"}),
        (figures.agreement(result.frame), {("a", "b"): "12%", ("a", "c"): "100%"}),
    ):
        (axes,) = figure.axes
        names = [label.get_text() for label in axes.get_yticklabels()]
        shown = {(names[int(each.get_position()[1])], names[int(each.get_position()[0])]): each for each in axes.texts}
        assert {pair: shown[pair].get_text() for pair in said} == said
        figures.plt.close(figure)
    for figure in (figures.latency(result.frame), figures.intervals(result.summary())):
        figure.canvas.draw()
        figures.plt.close(figure)


MANY = [f"demo:adapter-{at}-of-many$*0.5" for at in range(8)]


def test_no_label_of_a_figure_is_cut_off_whatever_style_is_set() -> None:
    mpl.use("agg")
    from serve_app.lab import figures

    frame = grid_of(dict.fromkeys(MANY, "yn")).assign(right=1.0)
    summary = evaluation.Evaluation(frame=frame, metric="right").summary()
    rows = {model: completion("a$b", "c" * 30) for model in MANY}
    with mpl.rc_context(mpl.rcParamsDefault):
        for figure in (
            figures.win_rates(frame, "right"),
            figures.agreement(frame.loc[frame["model"].isin(MANY[:2])]),
            figures.latency(frame),
            figures.intervals(summary, title="a$ and $b"),
            figures.heat_map(rows),
            figures.heat_map({"$": completion(*"abcdefgh" * 5)}, num_tokens=40),
            figures.distributions({f"{model[5:14]}$": {"a$b": -1.0, "c": -2.0} for model in MANY[:3]}),
        ):
            figure.canvas.draw()
            page, drawn = figure.bbox, figure.get_tightbbox().transformed(figure.dpi_scale_trans)
            assert (drawn.x0 >= page.x0 - 1, drawn.y0 >= page.y0 - 1) == (True, True), figure.texts
            assert (drawn.x1 <= page.x1 + 1, drawn.y1 <= page.y1 + 1) == (True, True), figure.texts
            figures.plt.close(figure)


def test_lines_of_many_models_are_told_apart() -> None:
    mpl.use("agg")
    from serve_app.lab import figures

    figure = figures.latency(grid_of(dict.fromkeys(MANY, "yn")))
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == len(MANY)
    figures.plt.close(figure)


def test_a_figure_leaves_out_a_model_that_always_failed_and_nothing_else() -> None:
    mpl.use("agg")
    from serve_app.lab import figures

    frame = grid_of({"a": "yy", "b": [None, None], "c": "yn"})
    frame["right"] = frame["text"].map({"y": 1.0, "n": 0.0})
    frame.loc[frame["model"] == "b", "seconds"] = None
    for figure, said in ((figures.win_rates(frame, "right"), ["75%", "25%"]), (figures.agreement(frame), ["50%"] * 2)):
        assert [text.get_text() for text in figure.axes[0].texts if text.get_text()] == said
        figures.plt.close(figure)
    figure = figures.latency(frame)
    assert [text.get_text()[0] for text in figure.legends[0].get_texts()] == ["a", "c"]
    figures.plt.close(figure)


def test_a_heat_map_of_nothing_says_what_to_send() -> None:
    from serve_app.lab import figures

    for rows in ({}, {"a": completion()}):
        with pytest.raises(ValueError, match="send logprobs=1"):
            figures.heat_map(rows)
