"""Draws curves on logarithmic axes as SVG, which every browser shows; no library is needed for that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from html import escape

WIDTH, HEIGHT, MARGIN = 560, 360, 60
FONT = 'font-family="sans-serif" font-size="12"'
COLORS = ("#1f6fb2", "#c2462e", "#2d8a4e", "#8a5fb0", "#a87a1c")
Points = Items[tuple[float, float]]


def curves(title: str, x_label: str, y_label: str, lines: Mapping[str, Points]) -> str:
    """One plot of some lines by name; coordinates are positive."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    across, down = _axis(xs, MARGIN, WIDTH - 15), _axis(ys, HEIGHT - MARGIN, 35)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 18, title, "middle"),
        _text(WIDTH / 2, HEIGHT - 12, x_label, "middle"),
        f'<g transform="rotate(-90 14 {HEIGHT / 2})">{_text(14, HEIGHT / 2, y_label, "middle")}</g>',
    ]
    for x in sorted(set(xs)):
        parts.append(_text(_at(x, across), HEIGHT - MARGIN + 18, f"{x:g}", "middle"))
    for y in _ticks(min(ys), max(ys)):
        at = _at(y, down)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - 15}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(_text(MARGIN - 6, at + 4, f"{y:g}", "end"))
    for number, (name, points) in enumerate(lines.items()):
        parts += _line(name, [(_at(x, across), _at(y, down)) for x, y in points], number)
    return "\n".join([*parts, "</svg>"]) + "\n"


Axis = tuple[float, float, float, float]
"""Logarithms of the least and the most, and where they are drawn."""


def _axis(values: Iterable[float], begin: float, end: float) -> Axis:
    logs = [math.log(value) for value in values]
    return min(logs), max(max(logs), min(logs) + 0.1), begin, end


def _at(value: float, axis: Axis) -> float:
    low, high, begin, end = axis
    return begin + (math.log(value) - low) / (high - low) * (end - begin)


def _ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for power in powers for tick in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if low <= tick <= high]


def _line(name: str, places: Points, number: int) -> list[str]:
    color = COLORS[number % len(COLORS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
    label = f'<g fill="{color}">{_text(MARGIN + 10, 40 + 16 * number, name, "start")}</g>'
    return [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>', *dots, label]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
