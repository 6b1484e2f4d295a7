"""Takes out of the ledger what is old enough: rows, whose sums by day stay for ever, and what replicas counted."""

from __future__ import annotations

from sqlalchemy import Engine, delete, literal, select, update

from serve_app.tenants.ledger_tables import FORGOTTEN, counted, replicas, rows
from serve_app.tenants.meters import period_of

DAY_S = 86_400.0
BATCH = 5_000
"""Rows of one transaction, so that whoever writes beside it waits for a moment alone."""


def prune(engine: Engine, *, now: float, days: int) -> int:
    """Remove the rows of requests that ended more than so many days ago; returns how many that were. What replicas
    counted that were not heard of for so long is forgotten as well: it is in the totals.

    now: Unix seconds

    A row that a router brings again after that would be taken for a new one; routers bring rows for as long as they
    live and cannot reach the store, so let days be more than that.
    """
    before = period_of(now - days * DAY_S, is_monthly=False)
    removed = 0
    while found := _remove_some(engine, before):
        removed += found
    _note_replicas(engine, period_of(now, is_monthly=False))
    while _forget_one(engine, before):
        pass
    return removed


def _remove_some(engine: Engine, before: str) -> int:
    old = select(rows.c.id).where(rows.c.day < before).limit(BATCH)
    with engine.begin() as connection:
        return connection.execute(delete(rows).where(rows.c.id.in_(old.scalar_subquery()))).rowcount


def _note_replicas(engine: Engine, today: str) -> None:
    """Those that an earlier version wrote down without the day were heard of today."""
    unknown = counted.c.replica_id.not_in(select(replicas.c.replica_id))
    found = select(counted.c.replica_id, literal(today)).where(unknown).distinct()
    with engine.begin() as connection:
        connection.execute(replicas.insert().from_select(["replica_id", "day"], found))


def _forget_one(engine: Engine, before: str) -> bool:
    """Whether there was one. That it was is kept: should it speak again, nothing is counted twice."""
    gone = select(replicas.c.replica_id).where(replicas.c.day < before, replicas.c.day != FORGOTTEN).limit(1)
    with engine.begin() as connection:
        replica_id = connection.execute(gone).scalar()
        if replica_id is None:
            return False
        connection.execute(delete(counted).where(counted.c.replica_id == replica_id))
        connection.execute(update(replicas).where(replicas.c.replica_id == replica_id).values(day=FORGOTTEN))
    return True
