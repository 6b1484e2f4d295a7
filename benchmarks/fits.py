"""How a cost grows: fits cost = fixed + slope * work ** exponent, and says whether it bends upward."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

EXPONENTS = tuple(step / 20 for step in range(4, 61))
"""That are tried: from 0.2 to 3."""
BENDS_FROM = 1.15
"""An exponent from which a cost is said to grow faster than its work."""
GAIN = 1.25
"""How much worse a straight line has to describe it; measurements are noisy."""
MANY_TIMES = 1.1
"""What the last measurement has to be above the straight line through the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """error: root mean square of relative differences;  straight_error: that of the best straight line"""

    fixed: float
    slope: float
    exponent: float
    error: float
    straight_error: float
    above_line: float

    @property
    def bends_upward(self) -> bool:
        is_curved = self.straight_error > GAIN * self.error and self.above_line > MANY_TIMES
        return self.exponent >= BENDS_FROM and is_curved


def fit(work: Items[float], cost: Items[float]) -> Fit:
    """Of at least three measurements at different amounts of positive work, in rising order."""
    assert len(work) == len(cost) >= 3, "three measurements at least"
    tried = [(*_line([each**exponent for each in work], cost), exponent) for exponent in EXPONENTS]
    fixed, slope, error, exponent = min(tried, key=lambda each: each[2])
    straight = _line(work, cost)
    begin = _line(work[:-1], cost[:-1])
    return Fit(
        fixed=fixed, slope=slope, exponent=exponent, error=error, straight_error=straight[2],
        above_line=cost[-1] / (begin[0] + begin[1] * work[-1]),
    )  # fmt: skip


def _line(xs: Items[float], ys: Items[float]) -> tuple[float, float, float]:
    """Fixed part, slope (neither below zero) and error of the line with the least relative differences."""
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    together = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True))
    lines = [(mean_y, 0.0)]
    if together > 0:
        slope = together / spread
        lines.append((mean_y - slope * mean_x, slope))
        through_zero = sum(w * x * y for w, x, y in zip(weights, xs, ys, strict=True))
        lines.append((0.0, through_zero / sum(w * x * x for w, x in zip(weights, xs, strict=True))))
    allowed = [(fixed, slope, _error(fixed, slope, xs, ys)) for fixed, slope in lines if fixed >= 0]
    return min(allowed, key=lambda each: each[2])


def _error(fixed: float, slope: float, xs: Items[float], ys: Items[float]) -> float:
    squares = [((fixed + slope * x) / y - 1) ** 2 for x, y in zip(xs, ys, strict=True)]
    return float((sum(squares) / len(squares)) ** 0.5)
