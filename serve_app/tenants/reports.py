"""Reports of usage: what is asked for in words, and the lines as JSON can hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from types import MappingProxyType

from serve_app.core.ledger import DIMENSIONS, UsageLine, UsageQuestion, as_csv
from serve_app.core.tenants import NANO
from serve_app.tenants.declaration import is_name
from serve_app.tenants.errors import TenancyError

DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "choices")
COLUMNS: Mapping[str, str] = MappingProxyType(
    {**dict.fromkeys(COUNTS, "integer"), "engine_seconds": "number", "cost": "number"}
)
"""Behind what is asked for by, each with its type as JSON Schema has it. Cost is in the currency of the prices."""


def question_of(arguments: Mapping[str, object]) -> UsageQuestion:
    """Of `by` (names between commas), `tenant`, `since`, `until`. Raises TenancyError."""
    by = tuple(name.strip() for name in str(arguments.get("by") or "tenant,model,day").split(","))
    if not set(by) <= set(DIMENSIONS) or len(set(by)) < len(by):
        raise TenancyError(f"by must be some of {', '.join(DIMENSIONS)}, each once; found {','.join(by)[:96]!r}.")
    days = {name: str(arguments.get(name) or "") for name in ("since", "until")}
    for name, day in days.items():
        if day and not _is_day(day):
            raise TenancyError(f"{name} must be a day like 2026-11-22; found {day[:96]!r}.")
    tenant = arguments.get("tenant")
    if tenant is not None and not is_name(str(tenant)):
        raise TenancyError(f"tenant must be the name of one; found {str(tenant)[:96]!a}.")
    return UsageQuestion(by=by, tenant=None if tenant is None else str(tenant), **days)


def columns_of(question: UsageQuestion) -> dict[str, str]:
    """Names and types of what each line of a report has, also where it has none."""
    return {**dict.fromkeys(question.by, "string"), **COLUMNS}


def report_of(lines: Sequence[UsageLine]) -> list[dict[str, object]]:
    """One flat object per line."""
    return [
        {
            **line.by,
            **{name: line.sums[name] for name in COUNTS},
            "engine_seconds": line.sums["engine_ns"] / NANO,
            "cost": line.sums["cost"] / NANO,
        }
        for line in lines
    ]


def _is_day(text: str) -> bool:
    """Whether the calendar has it, written the one way in which days are compared."""
    try:
        return DAY.fullmatch(text) is not None and bool(date.fromisoformat(text))
    except ValueError:
        return False


def csv_of(answer: Mapping[str, object]) -> str:
    """What the office answered of usage, as comma-separated values."""
    columns, data = answer["columns"], answer["data"]
    assert isinstance(columns, dict)
    assert isinstance(data, list)
    return as_csv(columns, data)
