"""Takes rows out of the ledger that are old enough; their sums by day stay for ever."""

from __future__ import annotations

from sqlalchemy import Engine, delete, select

from serve_app.tenants.ledger_tables import rows
from serve_app.tenants.meters import period_of

DAY_S = 86_400.0
BATCH = 5_000
"""Rows of one transaction, so that whoever writes beside it waits for a moment alone."""


def prune(engine: Engine, *, now: float, days: int) -> int:
    """Remove the rows of requests that ended more than so many days ago; returns how many that were.

    now: Unix seconds

    A row that a router brings again after that would be taken for a new one; routers bring rows for as long as they
    live and cannot reach the store, so let days be more than that.
    """
    before = period_of(now - days * DAY_S, is_monthly=False)
    removed = 0
    while found := _remove_some(engine, before):
        removed += found
    return removed


def _remove_some(engine: Engine, before: str) -> int:
    old = select(rows.c.id).where(rows.c.day < before).limit(BATCH)
    with engine.begin() as connection:
        return connection.execute(delete(rows).where(rows.c.id.in_(old.scalar_subquery()))).rowcount
