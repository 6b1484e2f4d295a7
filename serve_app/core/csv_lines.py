"""Writes reports as comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping


def as_csv(columns: Iterable[str], report: Iterable[Mapping[str, object]]) -> str:
    """With a line of names (RFC 4180), also where nothing follows. What a spreadsheet would take for a formula is text.

    columns: those of every line of the report
    """
    written = io.StringIO()
    writer = csv.DictWriter(written, list(columns))
    writer.writeheader()
    writer.writerows({name: _harmless(value) for name, value in each.items()} for each in report)
    return written.getvalue()


def _harmless(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
