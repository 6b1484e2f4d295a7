"""Figures of completions and grids: distributions, tokens with how sure a model was of them, models side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy
import pandas
from matplotlib.ticker import MaxNLocator, PercentFormatter

from serve_app.cli.screen import visible
from serve_app.lab.completion import Completion
from serve_app.lab.evaluation import by_prompt
from serve_app.lab.grid import parameters_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, GRID = "#22303c", "#6b7a87", "#dfe5ea"
COLOURS = ("#2f6f9f", "#d66028", "#4a9a6a", "#8a5fb0", "#b8953a", "#c04f72")
STYLE = {
    "figure.dpi": 96, "savefig.dpi": 96, "figure.facecolor": "white", "axes.facecolor": "white",
    "figure.constrained_layout.use": True, "font.size": 9.5, "axes.titlesize": 10.5, "axes.titlelocation": "left",
    "axes.titleweight": "bold", "axes.edgecolor": QUIET, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": QUIET, "ytick.color": QUIET, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": False, "grid.color": GRID, "legend.frameon": False,
}  # fmt: skip
FLOOR = -8.0
"""Nats at which a heat map has its darkest colour."""


def use_style() -> None:
    """One look for all figures of a notebook."""
    plt.rcParams.update(STYLE)
    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=COLOURS)


def distributions(panels: Mapping[str, Mapping[str, float]], *, num_tokens: int = 10) -> Figure:
    """A panel for each distribution, with the tokens of the first one in its order.

    panels: by title, log-probabilities by token
    """
    first = next(iter(panels.values()))
    tokens = sorted(first, key=lambda token: -first[token])[:num_tokens]
    figure: Figure
    figure, row = plt.subplots(1, len(panels), figsize=(2.1 * len(panels) + 1.4, 0.27 * len(tokens) + 1.1), sharey=True)
    shares = {title: [math.exp(given.get(token, -math.inf)) for token in tokens] for title, given in panels.items()}
    widest = max(max(heights) for heights in shares.values())
    for colour, axes, (title, heights) in zip(_colours(len(panels)), _listed(row), shares.items(), strict=True):
        axes.barh(range(len(tokens)), heights, color=colour, height=0.72)
        for at, height in enumerate(heights):
            said = f"{height:.0%}" if height >= 0.005 else ("·" if height else "out")
            axes.text(height + 0.02 * widest, at, said, va="center", fontsize=8, color=QUIET)
        axes.set(xlim=(0, 1.25 * widest), title=title)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.tick_params(length=0)
    _name_tokens(_listed(row)[0], tokens)
    return figure


def heat_map(rows: Mapping[str, Completion], *, first: int = 0, num_tokens: int = 16) -> Figure:
    """A row for each completion, its tokens from `first` on in cells that are the darker the less likely they were."""
    height = 0.62 * len(rows) + 1.1
    figure: Figure
    figure, axes = plt.subplots(figsize=(9.4, height))
    shown = range(first, min(first + num_tokens, max(len(each.tokens) for each in rows.values())))
    values = [[_logprob(each, at) for at in shown] for each in rows.values()]
    picture = axes.imshow(values, cmap="YlOrBr_r", vmin=FLOOR, vmax=0, aspect="auto")
    for row, each in enumerate(rows.values()):
        for at, token in enumerate(each.tokens[first : shown.stop]):
            shade = "white" if (token.logprob or 0) < FLOOR * 0.62 else INK
            axes.text(
                at, row, _short(token.text), ha="center", va="center", fontsize=7.5, color=shade, parse_math=False
            )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xticks(range(len(shown)), [str(at) for at in shown])
    axes.set(xlabel="token")
    axes.tick_params(length=0)
    figure.colorbar(picture, ax=axes, label="log-probability", shrink=0.9, pad=0.01)
    return figure


def intervals(summary: pandas.DataFrame, *, title: str = "") -> Figure:
    """A model's mean and its interval on a line each. summary: of an `Evaluation`"""
    figure: Figure
    figure, axes = plt.subplots(figsize=(6.4, 0.36 * len(summary) + 0.9))
    for row, (colour, each) in enumerate(zip(_colours(len(summary)), summary.itertuples(), strict=True)):
        axes.hlines(row, each.low, each.high, color=colour, linewidth=2.5)
        axes.plot(each.mean, row, "o", color=colour)
    axes.set_yticks(range(len(summary)), list(summary.index), parse_math=False)
    axes.set(title=title, xlabel="mean, 95 % interval")
    axes.margins(y=0.15)
    axes.invert_yaxis()
    axes.grid(axis="x")
    return figure


def win_rates(frame: pandas.DataFrame, metric: str) -> Figure:
    """How often the model of a row is better than that of a column, by prompt; a tie is half a win."""
    means = by_prompt(frame, metric).dropna()
    share = {other: (means.gt(means[other], axis=0) + means.eq(means[other], axis=0) / 2).mean() for other in means}
    return _squared(pandas.DataFrame(share), title=f"Wins by {metric}")


def agreement(frame: pandas.DataFrame) -> Figure:
    """How often two models wrote the same text for the same prompt and parameters."""
    cells = frame.drop_duplicates(["model", "prompt", *parameters_of(frame)])
    texts = cells.set_index(["prompt", *parameters_of(frame), "model"])["text"].unstack("model")
    texts = texts[list(dict.fromkeys(frame["model"]))].dropna()
    share = {other: texts.eq(texts[other], axis=0).mean() for other in texts}
    return _squared(pandas.DataFrame(share), title="Same text")


def latency(frame: pandas.DataFrame) -> Figure:
    """What share of a model's completions was there after how many seconds, a wait for a place included."""
    figure: Figure
    figure, axes = plt.subplots(figsize=(8.4, 2.8))
    for colour, (model, seconds) in zip(
        _colours(frame["model"].nunique()), frame.groupby("model", sort=False)["seconds"], strict=True
    ):
        axes.ecdf(seconds.dropna(), color=colour, label=f"{model}: median {seconds.median():.2f} s")
    axes.set(xlabel="seconds", ylabel="share of completions", xlim=(0, None))
    axes.grid(axis="y")
    for text in axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8).get_texts():
        text.set_parse_math(False)
    return figure


def _squared(shares: pandas.DataFrame, *, title: str) -> Figure:
    """A cell for each two models, and none for a model and itself."""
    shares = shares.mask(numpy.eye(len(shares), dtype=bool))
    figure: Figure
    figure, axes = plt.subplots(figsize=(1.1 * len(shares) + 1.6, 0.5 * len(shares) + 1.3))
    axes.imshow(shares, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto")
    for row in range(len(shares)):
        for column in range(len(shares)):
            share = shares.iat[row, column]
            said = "" if math.isnan(share) else f"{share:.0%}"
            axes.text(column, row, said, ha="center", va="center", color="white" if share > 0.6 else INK)
    axes.set_xticks(range(len(shares)), list(shares.columns), rotation=20, ha="right", parse_math=False)
    axes.set_yticks(range(len(shares)), list(shares.index), parse_math=False)
    axes.tick_params(length=0)
    axes.set(title=title)
    return figure


def _logprob(each: Completion, at: int) -> float:
    if at >= len(each.tokens):
        return math.nan
    logprob = each.tokens[at].logprob
    return 0.0 if logprob is None else max(FLOOR, logprob)


def _name_tokens(axes: Axes, tokens: Sequence[str]) -> None:
    labels = [_short(token) for token in tokens]
    axes.set_yticks(range(len(tokens)), labels, parse_math=False, fontfamily="monospace")
    axes.invert_yaxis()


def _short(token: str) -> str:
    """A token on one line; what a model wrote is text, never markup of a formula."""
    shown = visible(token).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣", 1)
    return shown if len(shown) <= 11 else f"{shown[:10]}…"


def _colours(count: int) -> list[str]:
    return [COLOURS[at % len(COLOURS)] for at in range(count)]


def _listed(axes: Any) -> list[Axes]:
    return list(axes.flat) if hasattr(axes, "flat") else [axes]
