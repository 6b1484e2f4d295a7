"""Keeps the set of published adapters in the store of tenants, each change with its event."""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from serve_app.core.adapters import AdapterSet, Canary, PublishedAdapter
from serve_app.tenants import tables
from serve_app.tenants.errors import unavailable
from serve_app.tenants.published import Change, changed
from serve_app.tenants.store import Author, TenantStore, fact, note

REVISION = "adapters"
"""The name of the fact."""
KEPT = ("base", "name", "version", "path", "published_at", "by")
"""Of an adapter, under the same names as columns."""


def published_in(store: TenantStore) -> AdapterSet:
    """Return the set as it is at one moment."""
    with store.engine.connect() as connection:
        return _read(connection)


def change_published(store: TenantStore, change: Change) -> AdapterSet:
    """Carry out a change, with its event, in one transaction; return the set after it.

    Raises as `changed`, and StoreUnavailable where the database fails.
    """
    try:
        with store.growing() as connection:
            before = _read(connection)
            after = changed(before, change)
            if after is not before:
                _write(connection, change, before, after)
            if after is not before or (change.action == "hold" and not _is_told(connection, before, change)):
                author = Author(name=change.actor or change.by, at=change.at)
                said = {name: getattr(change, name) for name in ("version", "path", "share", "reason")}
                told = {name: value for name, value in said.items() if value not in ("", None)}
                details = {"adapter": change.address, "by": change.by, "revision": after.revision, **told}
                note(connection, author, f"{change.action} adapter", change.address[: tables.MAX_NAME_CHARS], details)
        return after
    except SQLAlchemyError as error:
        raise unavailable(error) from error


def _is_told(connection: Connection, published: AdapterSet, change: Change) -> bool:
    """Return whether another router has told already that a canary is held at its share, or the canary has ended."""
    found = published.find(change.base, change.name)
    canary = None if found is None else found.canary
    if canary is None or (canary.version, canary.share) != (change.version, change.tried):
        return True
    events = tables.events.c
    subject = change.address[: tables.MAX_NAME_CHARS]
    is_it = (events.action == "hold adapter", events.subject == subject, events.at >= canary.since)
    wanted = select(events.id).where(*is_it)
    return connection.execute(wanted.limit(1)).first() is not None


def _read(connection: Connection) -> AdapterSet:
    columns = tables.published.c
    rows = connection.execute(select(tables.published).order_by(columns.published_at, columns.base, columns.name)).all()
    canaries = {
        (row.base, row.name): Canary(version=row.version, path=row.path, share=row.share, since=row.since, by=row.by)
        for row in connection.execute(select(tables.canaries))
    }
    adapters = tuple(
        PublishedAdapter(
            **{name: getattr(row, name) for name in KEPT},
            previous=None if row.previous_version is None else (row.previous_version, row.previous_path),
            canary=canaries.get((row.base, row.name)),
        )
        for row in sorted(rows, key=lambda row: (row.base, row.name))
        if row.version is not None
    )
    withdrawn = tuple((row.base, row.name) for row in rows if row.version is None)
    return AdapterSet(revision=fact(connection, REVISION), adapters=adapters, withdrawn=withdrawn)


def _write(connection: Connection, change: Change, before: AdapterSet, after: AdapterSet) -> None:
    """Write what differs: what the name means, and which withdrawn names are remembered."""
    key = (change.base, change.name)
    for table in tables.OF_ADAPTERS:
        for base, name in {key} | (set(before.withdrawn) - set(after.withdrawn)):
            connection.execute(delete(table).where(table.c.base == base, table.c.name == name))
    found = after.find(*key)
    connection.execute(insert(tables.published), [_tombstone(*key, at=change.at) if found is None else _row(found)])
    if found is not None and found.canary is not None:
        connection.execute(insert(tables.canaries), [{"base": key[0], "name": key[1], **asdict(found.canary)}])
    known = update(tables.facts).where(tables.facts.c.name == REVISION)
    if not connection.execute(known.values(value=after.revision)).rowcount:
        connection.execute(insert(tables.facts), [{"name": REVISION, "value": after.revision}])


def _row(adapter: PublishedAdapter) -> dict[str, object]:
    version, path = adapter.previous or (None, None)
    kept = {name: getattr(adapter, name) for name in KEPT}
    return {**kept, "previous_version": version, "previous_path": path}


def _tombstone(base: str, name: str, *, at: float) -> dict[str, object]:
    nothing = dict.fromkeys(("version", "path", "previous_version", "previous_path"))
    return {"base": base, "name": name, "published_at": at, "by": "", **nothing}
