"""Figures of measurements: quantiles, what a round of requests came to, medians of rounds and ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

from benchmarks.load import Answer

Figures = dict[str, float | None]
"""By name, with its unit in the name; None where nothing was measured."""

QUANTILES = (50, 99)


def quantile(values: Items[float], percent: float) -> float | None:
    """By nearest rank: a value that was measured; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def round_figures(answers: Items[Answer]) -> Figures:
    """What one round came to; requests with an error count in `errors` and in nothing else."""
    good = [each for each in answers if each.error is None]
    span = max(each.ended_at for each in answers) - min(each.sent_at for each in answers)
    prompt_tokens, output_tokens = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    figures: Figures = {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "seconds": span,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / span,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / span,
    }
    spans = {
        "first_token": [a.seen_at[0] - a.sent_at for a in good if a.seen_at],
        "gap": [gap for a in good for gap in a.gaps],
        "whole": [a.ended_at - a.sent_at for a in good],
    }
    for name, values in spans.items():
        for percent in QUANTILES:
            found = quantile(values, percent)
            figures[f"{name}_p{percent}_ms"] = None if found is None else found * 1e3
    return figures


def medians(rounds: Items[Figures]) -> Figures:
    """Of each figure over the rounds that have it; errors are added up."""
    found: Figures = {}
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        known = [value for value in values if value is not None]
        found[name] = statistics.median(known) if known else None
    if "errors" in found:
        found["errors"] = sum(each["errors"] or 0 for each in rounds)
    return found


def ratios(figures: Figures, other: Figures) -> Figures:
    """Each figure as a multiple of the other's; None where there is nothing to divide by."""
    return {
        name: value / divisor if value is not None and (divisor := other.get(name)) else None
        for name, value in figures.items()
    }


def table(rows: Items[Mapping[str, Any]], columns: Items[str]) -> str:
    """Rows as aligned text, each number as short as it is clear."""
    cells = [list(columns), *([shown(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case float() if abs(value) >= 100:
            return f"{value:.0f}"
        case float():
            return f"{value:.3g}"
        case _:
            return str(value)
