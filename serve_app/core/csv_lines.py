"""Writes reports as comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence


def as_csv(report: Sequence[Mapping[str, object]]) -> str:
    """With a line of names (RFC 4180). What a spreadsheet would take for a formula is text."""
    written = io.StringIO()
    if report:
        writer = csv.DictWriter(written, list(report[0]))
        writer.writeheader()
        writer.writerows({name: _harmless(value) for name, value in each.items()} for each in report)
    return written.getvalue()


def _harmless(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
