"""Tenants, keys and events as they are read and written within a transaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from serve_app.core.tenants import Scope, Tenant
from serve_app.tenants import tables
from serve_app.tenants.declaration import is_name, tenant_from, told_of
from serve_app.tenants.errors import NotThere, TenancyError
from serve_app.tenants.keys import Key

ADDED = "add tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who changes something, and when (Unix seconds). name: a key's id, or `command line`"""

    name: str
    at: float


def fact(connection: Connection, name: str) -> int:
    return connection.execute(select(tables.facts.c.value).where(tables.facts.c.name == name)).scalar() or 0


def note(connection: Connection, by: Author, action: str, subject: str, details: Mapping[str, object]) -> None:
    row = {"at": by.at, "actor": by.name, "action": action, "subject": subject, "details": dict(details)}
    connection.execute(insert(tables.events), [row])


def add_tenant(connection: Connection, tenant: Tenant) -> None:
    try:
        connection.execute(insert(tables.tenants), [{"name": tenant.name, "declared": told_of(tenant)}])
    except IntegrityError:
        raise TenancyError(f"There is a tenant {tenant.name!r} already.") from None


def added(connection: Connection) -> dict[str, int]:
    """The number of the event by which each tenant was added last."""
    events = tables.events.c
    number = func.max(events.id).label("number")
    wanted = select(events.subject, number).where(events.action == ADDED).group_by(events.subject)
    return {row.subject: row.number for row in connection.execute(wanted)}


def set_tenant(connection: Connection, tenant: Tenant) -> None:
    wanted = update(tables.tenants).where(tables.tenants.c.name == tenant.name)
    if not connection.execute(wanted.values(declared=told_of(tenant))).rowcount:
        raise NotThere(f"There is no tenant {tenant.name!r}.")


def remove_tenant(connection: Connection, name: str) -> None:
    if not connection.execute(delete(tables.tenants).where(tables.tenants.c.name == name)).rowcount:
        raise NotThere(f"There is no tenant {name!r}.")


def tenant_named(connection: Connection, name: str) -> Tenant:
    row = connection.execute(select(tables.tenants).where(tables.tenants.c.name == name)).one_or_none()
    if row is None:
        raise NotThere(f"There is no tenant {name!r}.")
    return tenant_of(row)


def add_key(connection: Connection, key: Key, by: Author) -> None:
    columns = {column.name: getattr(key, column.name) for column in tables.keys.columns}
    connection.execute(insert(tables.keys), [{**columns, "scopes": sorted(key.scopes)}])
    details = {"tenant": key.tenant, "scopes": sorted(key.scopes), "expires_at": key.expires_at}
    note(connection, by, "create key", key.id, details)


def end_key(connection: Connection, key: Key, until: float, by: Author, details: Mapping[str, object]) -> None:
    until = until if key.revoked_at is None else min(until, key.revoked_at)
    connection.execute(update(tables.keys).where(tables.keys.c.id == key.id).values(revoked_at=until))
    note(connection, by, "end key", key.id, {"revoked_at": until, **details})


def tenant_of(row: Row[Any]) -> Tenant:
    return tenant_from(row.declared)


def check_name(kind: str, name: str) -> None:
    """Raise NotThere for what no database may be asked for, as half a character, or NUL."""
    if not is_name(name):
        raise NotThere(f"There is no {kind} {name[: tables.MAX_NAME_CHARS]!a}.")


def key_named(connection: Connection, key_id: str) -> Key:
    row = connection.execute(select(tables.keys).where(tables.keys.c.id == key_id)).one_or_none()
    if row is None:
        raise NotThere(f"There is no key {key_id!r}.")
    return key_of(row)


def key_of(row: Row[Any]) -> Key:
    return Key(
        id=row.id,
        tenant=row.tenant,
        digest=row.digest,
        scopes=frozenset(map(Scope, row.scopes)),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )
