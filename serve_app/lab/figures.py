"""Figures of completions and grids: distributions, tokens with how sure a model was of them, models side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import pandas
from matplotlib.ticker import MaxNLocator, PercentFormatter

from serve_app.cli.screen import visible
from serve_app.lab.completion import Completion
from serve_app.lab.evaluation import by_prompt
from serve_app.lab.grid import parameters_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_UPRIGHT = 20
"""Cells of a heat map that are wide enough for a token; in more it stands on end."""
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
ABSENT = "#eef1f4"
"""Where a heat map has no token, and a square nothing to compare."""
LINES = ("-", "--", ":")
"""Of models, after all colours were taken."""


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
    figure, row = _drawn(2.1 * len(panels) + 1.4, 0.27 * len(tokens) + 1.1, ncols=len(panels), sharey=True)
    shares = {title: [math.exp(given.get(token, -math.inf)) for token in tokens] for title, given in panels.items()}
    widest = max(max(heights) for heights in shares.values())
    for colour, axes, (title, heights) in zip(_colours(len(panels)), _listed(row), shares.items(), strict=True):
        axes.barh(range(len(tokens)), heights, color=colour, height=0.72)
        for at, height in enumerate(heights):
            said = f"{height:.0%}" if height >= 0.005 else ("·" if height else "out")
            axes.text(height + 0.02 * widest, at, said, va="center", fontsize=8, color=QUIET)
        axes.set(xlim=(0, 1.25 * widest))
        axes.set_title(title, parse_math=False)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.tick_params(length=0)
    _name_tokens(_listed(row)[0], tokens)
    return figure


def heat_map(rows: Mapping[str, Completion], *, first: int = 0, num_tokens: int = 16) -> Figure:
    """A row for each completion, its tokens from `first` on in cells that are the darker the less likely they were.

    Raises ValueError where no completion has so many tokens with log-probabilities.
    """
    shown = range(first, min(first + num_tokens, max((len(each.tokens) for each in rows.values()), default=0)))
    if not shown:
        raise ValueError(f'"rows" must have tokens from {first} on: send logprobs=1; found none.')
    figure, axes = _drawn(9.4, 0.62 * len(rows) + 1.1)
    axes.set_facecolor(ABSENT)
    values = [[_logprob(each, at) for at in shown] for each in rows.values()]
    picture = axes.imshow(values, cmap="YlOrBr_r", vmin=FLOOR, vmax=0, aspect="auto")
    axes.hlines([row - 0.5 for row in range(1, len(rows))], -0.5, len(shown) - 0.5, color="white", linewidth=2)
    rotation = 90 if len(shown) > MAX_UPRIGHT else 0
    for row, each in enumerate(rows.values()):
        for at, token in enumerate(each.tokens[first : shown.stop]):
            shade = "white" if (token.logprob or 0) < FLOOR * 0.62 else INK
            where = {"ha": "center", "va": "center", "rotation": rotation}
            axes.text(at, row, _short(token.text, 8), **where, fontsize=7.5, color=shade, parse_math=False)
    axes.set_yticks(range(len(rows)), list(rows), parse_math=False)
    axes.set_xticks(range(len(shown)), [str(at) for at in shown])
    axes.set(xlabel="token")
    axes.tick_params(length=0)
    figure.colorbar(picture, ax=axes, label="log-probability", shrink=0.9, pad=0.01)
    return figure


def intervals(summary: pandas.DataFrame, *, title: str = "") -> Figure:
    """A model's mean and its interval on a line each. summary: of an `Evaluation`"""
    figure, axes = _drawn(6.4, 0.36 * len(summary) + 0.9)
    for row, (colour, each) in enumerate(zip(_colours(len(summary)), summary.itertuples(), strict=True)):
        axes.hlines(row, each.low, each.high, color=colour, linewidth=2.5)
        axes.plot(each.mean, row, "o", color=colour)
    axes.set_yticks(range(len(summary)), list(summary.index), parse_math=False)
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="mean, 95 % interval")
    axes.margins(y=0.15)
    axes.invert_yaxis()
    axes.grid(axis="x")
    return figure


def win_rates(frame: pandas.DataFrame, metric: str) -> Figure:
    """How often the model of a row is better than that of a column, by prompt; a tie is half a win."""
    means = by_prompt(frame, metric)

    def wins(one: pandas.Series[Any], other: pandas.Series[Any]) -> float:
        return float((one.gt(other) + one.eq(other) / 2).mean())

    return _squared(means, wins, title=f"Row beats column, by {metric}")


def agreement(frame: pandas.DataFrame) -> Figure:
    """How often two models wrote the same text for the same prompt and parameters."""
    cells = frame.drop_duplicates(["model", "prompt", *parameters_of(frame)])
    texts = cells.set_index(["prompt", *parameters_of(frame), "model"])["text"].unstack("model")
    texts = texts[list(dict.fromkeys(frame["model"]))]
    return _squared(texts, lambda one, other: float(one.eq(other).mean()), title="Same text")


def latency(frame: pandas.DataFrame) -> Figure:
    """What share of a model's completions was there after how many seconds, a wait for a place included."""
    there = frame.dropna(subset=["seconds"]).groupby("model", sort=False)["seconds"]
    figure, axes = _drawn(8.4, 2.8 + 0.22 * max(0, len(there) - 10))
    for at, (colour, (model, seconds)) in enumerate(zip(_colours(len(there)), there, strict=True)):
        line = LINES[at // len(COLOURS) % len(LINES)]
        axes.ecdf(seconds, color=colour, linestyle=line, label=f"{model}: median {seconds.median():.2f} s")
    axes.set(xlabel="seconds, waiting included", ylabel="share of completions", xlim=(0, None))
    axes.grid(axis="y")
    for text in figure.legend(loc="outside right center", fontsize=8).get_texts():
        text.set_parse_math(False)
    return figure


def _squared(
    columns: pandas.DataFrame, share: Callable[[pandas.Series[Any], pandas.Series[Any]], float], *, title: str
) -> Figure:
    """A cell for each two models, of the rows that both have, and none for a model and itself."""
    shares = pandas.DataFrame(math.nan, index=columns.columns, columns=columns.columns)
    for one, other in permutations(columns, 2):
        both = columns[[one, other]].dropna()
        shares.loc[one, other] = share(both[one], both[other])
    figure, axes = _drawn(max(4.2, 1.1 * len(shares) + 1.6), 0.5 * len(shares) + 1.3)
    axes.set_facecolor(ABSENT)
    axes.imshow(shares, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto")
    for row in range(len(shares)):
        for column in range(len(shares)):
            value = shares.iat[row, column]
            said = "" if math.isnan(value) else f"{value:.0%}"
            axes.text(column, row, said, ha="center", va="center", color="white" if value > 0.6 else INK)
    axes.set_xticks(range(len(shares)), list(shares.columns), rotation=20, ha="right", parse_math=False)
    axes.set_yticks(range(len(shares)), list(shares.index), parse_math=False)
    axes.tick_params(length=0)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold", parse_math=False)
    return figure


def _drawn(width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    """An empty figure, which makes room for its labels whatever style is set."""
    figure: Figure
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained", **options)
    return figure, axes


def _logprob(each: Completion, at: int) -> float:
    if at >= len(each.tokens):
        return math.nan
    logprob = each.tokens[at].logprob
    return 0.0 if logprob is None else max(FLOOR, logprob)


def _name_tokens(axes: Axes, tokens: Sequence[str]) -> None:
    labels = [_short(token) for token in tokens]
    axes.set_yticks(range(len(tokens)), labels, parse_math=False, fontfamily="monospace")
    axes.invert_yaxis()


def _short(token: str, most: int = 11) -> str:
    """A token on one line; what a model wrote is text, never markup of a formula."""
    shown = visible(token).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣", 1)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _colours(count: int) -> list[str]:
    return [COLOURS[at % len(COLOURS)] for at in range(count)]


def _listed(axes: Any) -> list[Axes]:
    return list(axes.flat) if hasattr(axes, "flat") else [axes]
