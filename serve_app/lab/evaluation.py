"""Scores of texts, metrics of grids with bootstrap intervals, and paired tests of two models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import pandas

from serve_app.lab.completion import Completion

Metric = Callable[[Mapping[str, Any]], float]
Resample = Callable[[numpy.random.Generator], numpy.ndarray]
ECHOED: Mapping[str, Any] = {"echo": True, "max_tokens": 0, "logprobs": 0}
"""Nothing is generated; each token of the prompt has its log-probability."""
NUM_RESAMPLES = 10_000
RESAMPLES_AT_ONCE = 500
MAX_EXACT = 13
"""Prompts up to which a test tries every combination of signs, 8192 at most."""
TAIL = 2.5
"""Percent on each side of an interval."""
ROUNDING = 1e-12
"""Of a sum, as a share of what is summed up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What models are worth by one metric.

    frame:  a row per completion: the grid's columns, those of the dataset, and the metric's
    metric: the name of its column
    """

    frame: pandas.DataFrame = field(repr=False)
    metric: str

    def summary(self) -> pandas.DataFrame:
        """A row per model: the mean, its 95 % interval, prompts, and completions that failed."""
        rows = {}
        for model, column in by_prompt(self.frame, self.metric).items():
            values = column.dropna().to_numpy()
            low, high = interval(values)
            failed = int(self.frame.loc[self.frame["model"] == model, "error"].notna().sum())
            mean = float(values.mean()) if len(values) else float("nan")
            rows[model] = {"mean": mean, "low": low, "high": high, "prompts": len(values), "failed": failed}
        return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("model")

    def _repr_html_(self) -> str:
        html: str = self.summary().round(3)._repr_html_()
        return html


def evaluated(frame: pandas.DataFrame, dataset: pandas.DataFrame, metric: Metric) -> Evaluation:
    """Add the dataset's columns to a grid's rows by their prompt, and the metric of each row; none where it failed."""
    joined = frame.reset_index().merge(dataset, on="prompt", how="left").set_index("id")
    name = metric.__name__
    rows = joined.to_dict("records")
    joined[name] = [float("nan") if pandas.isna(row["text"]) else float(metric(row)) for row in rows]
    return Evaluation(frame=joined, metric=name)


def examples_of(
    dataset: pandas.DataFrame | Iterable[Mapping[str, Any]], metric: Metric, reserved: Collection[str]
) -> pandas.DataFrame:
    """Return a dataset as a table. reserved: names of a grid's columns

    Raises ValueError where it has no prompts, a prompt twice, or a column of a name that is taken, as by the metric.
    """
    examples = dataset if isinstance(dataset, pandas.DataFrame) else pandas.DataFrame(list(dataset))
    taken = sorted(set(reserved) & set(examples.columns) - {"prompt"})
    if "prompt" not in examples.columns or taken:
        found = ", ".join(taken or map(str, examples.columns)) or "no column"
        raise ValueError(f'"dataset" must have a column "prompt", and none that a grid has, too; found {found}.')
    if twice := list(examples.loc[examples["prompt"].duplicated(), "prompt"].head(1)):
        raise ValueError(f'"dataset" must have each prompt once; found again: {twice[0]!r}.')
    name = getattr(metric, "__name__", None)
    if name is None or name in {*reserved, *examples.columns}:
        raise ValueError(f'"metric" must be a function whose name no other column has; found {name or metric!r}.')
    return examples


def compare_paired(frame: pandas.DataFrame, a: str, b: str, metric: str) -> pandas.Series[Any]:
    """Say how much better `a` is than `b`: the mean difference, its 95 % interval, and p of a paired permutation test.

    Of a prompt with several completions the mean counts. If two models were alike, each difference could have either
    sign: p is the share of signs that give a mean as far from 0. Raises ValueError where a model has no rows.
    """
    means = by_prompt(frame, metric)
    for model in (a, b):
        if model not in means:
            raise ValueError(f'"frame" must have rows of both models; found none of {model!r}, but {list(means)}.')
    both = means[[a, b]].dropna()
    differences = (both[a] - both[b]).to_numpy()
    low, high = interval(differences)
    mean = float(differences.mean()) if len(differences) else float("nan")
    told = {"difference": mean, "low": low, "high": high, "p": permutation_p(differences), "prompts": len(differences)}
    return pandas.Series(told, name=f"{a} − {b}", dtype=object)


def by_prompt(frame: pandas.DataFrame, metric: str) -> pandas.DataFrame:
    """Return the mean of a metric: a row per prompt, a column per model, in the order of the frame."""
    means = frame.groupby(["prompt", "model"], sort=False)[metric].mean().unstack("model")
    return means[list(dict.fromkeys(frame["model"]))]


def interval(values: numpy.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of independent values, the same in every run."""
    if len(values) == 0:
        return float("nan"), float("nan")
    means = _resampled(lambda rng: values[rng.integers(0, len(values), (RESAMPLES_AT_ONCE, len(values)))].mean(axis=1))
    low, high = numpy.percentile(means, [TAIL, 100 - TAIL])
    return float(low), float(high)


def permutation_p(differences: numpy.ndarray) -> float:
    """Return how likely a mean as far from 0 is by chance: of all signs where prompts are few, else of random ones."""
    size = len(differences)
    least = abs(differences.sum()) - ROUNDING * abs(differences).sum()
    if size <= MAX_EXACT:
        signs = 1 - 2 * ((numpy.arange(2**size)[:, None] >> numpy.arange(size)) & 1)
        return float(numpy.mean(abs(signs @ differences) >= least))
    sums = _resampled(lambda rng: rng.choice((-1.0, 1.0), (RESAMPLES_AT_ONCE, size)) @ differences)
    return float((1 + numpy.sum(abs(sums) >= least)) / (1 + NUM_RESAMPLES))


def scores(prompts: Sequence[str], continuations: Sequence[str], echoed: Sequence[Completion]) -> pandas.DataFrame:
    """Return a row per continuation: its tokens, and the sum of their log-probabilities.

    A token that begins in the prompt and ends in the continuation belongs to the continuation.
    """
    rows = []
    for prompt, continuation, one in zip(prompts, continuations, echoed, strict=True):
        begins = [token.offset or 0 for token in one.tokens]
        counted = [
            token.logprob
            for token, begin, end in zip(one.tokens, begins, [*begins[1:], len(one.text)], strict=True)
            if token.logprob is not None and max(begin + 1, end) > len(prompt)
        ]
        rows.append({"prompt": prompt, "continuation": continuation, "tokens": len(counted), "logprob": sum(counted)})
    return pandas.DataFrame(rows, columns=["prompt", "continuation", "tokens", "logprob"])


def perplexities(scored: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row per text: its tokens but the first, which nothing predicts, and exp of minus their mean."""
    mean = scored["logprob"] / scored["tokens"].where(scored["tokens"] > 0)
    return pandas.DataFrame(
        {"text": scored["continuation"], "tokens": scored["tokens"], "perplexity": numpy.exp(-mean)}
    )


def _resampled(draw: Resample) -> numpy.ndarray:
    """Draw as often as is enough for two digits of p, in parts that fit in memory, by fixed seeds."""
    rng = numpy.random.default_rng(0)
    return numpy.concatenate([draw(rng) for _ in range(NUM_RESAMPLES // RESAMPLES_AT_ONCE)])
