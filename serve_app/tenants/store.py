"""Keeps tenants, keys and events in a database: SQLite for one machine, PostgreSQL where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Engine, Row, create_engine, delete, event, func, insert, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from serve_app.core.tenants import Scope, Tenant
from serve_app.tenants import tables
from serve_app.tenants.declaration import is_name, tenant_from, told_of
from serve_app.tenants.directory import Directory
from serve_app.tenants.errors import NotThere, TenancyError, unopened
from serve_app.tenants.keys import Key
from serve_app.tenants.pepper import fingerprint_of

BUSY_TIMEOUT_MS = 10_000
ADDED = "add tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who changes something, and when (Unix seconds). name: a key's id, or `command line`"""

    name: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change that was made."""

    id: int
    at: float
    actor: str
    action: str
    subject: str
    details: Mapping[str, object]


class TenantStore:
    """url: as SQLAlchemy reads it, `sqlite:///serve_app.db` or `postgresql+psycopg://…`

    is_made: whether tables are made where there are none; where not, nothing is written by opening it

    Several processes may have the same store open. Every change is one transaction, with its event, and makes
    `version` grow. Raises TenancyError where there is no database, or one of another schema.
    """

    def __init__(self, url: str, *, is_made: bool = True) -> None:
        try:
            self._engine = create_engine(url, pool_pre_ping=True)  # a server may have been started anew
        except (SQLAlchemyError, ImportError) as error:
            raise unopened(error) from error
        if is_made and self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _prepare_sqlite)
        try:
            schema = self._create() if is_made else self._schema()
            if schema != tables.SCHEMA:
                raise TenancyError(f"The store of tenants has schema {schema}; this version reads {tables.SCHEMA}.")
        except BaseException as error:
            self.close()
            if isinstance(error, SQLAlchemyError):
                raise unopened(error) from error
            raise

    @property
    def engine(self) -> Engine:
        """Of the database, for what else is kept there."""
        return self._engine

    def close(self) -> None:
        self._engine.dispose()

    @property
    def version(self) -> int:
        """Of what is kept now."""
        with self._engine.connect() as connection:
            return _fact(connection, "version")

    @property
    def has_pepper(self) -> bool:
        """Whether a pepper was used with it already."""
        with self._engine.connect() as connection:
            return _fact(connection, "pepper") > 0

    def is_pepper(self, pepper: bytes) -> bool:
        """Whether keys are made under it; any is, where none was used yet."""
        with self._engine.connect() as connection:
            return _fact(connection, "pepper") in (0, fingerprint_of(pepper))

    def use_pepper(self, pepper: bytes) -> None:
        """Raises TenancyError where keys were made under another one, as none of them would open the door."""
        with self._engine.begin() as connection:
            known = _fact(connection, "pepper")
            if not known:
                row = {"name": "pepper", "value": fingerprint_of(pepper)}
                connection.execute(insert(tables.facts), [row])
        if known and known != fingerprint_of(pepper):
            raise TenancyError("This is not the pepper that the keys of the store were made under.")

    def directory(self, pepper: bytes) -> Directory:
        """Everything as it is at one moment."""
        with self._engine.connect() as connection:
            version = _fact(connection, "version")  # first: what changes meanwhile is looked at again
            rows, keys = connection.execute(select(tables.tenants)).all(), connection.execute(select(tables.keys)).all()
            added = _added(connection)
        tenants = [replace(_tenant(row), added=added.get(row.name, 0)) for row in rows]
        return Directory(tenants, map(_key, keys), pepper=pepper, version=version)

    def tenants(self) -> list[Tenant]:
        """All of them, by name."""
        with self._engine.connect() as connection:
            return [_tenant(row) for row in connection.execute(select(tables.tenants).order_by(tables.tenants.c.name))]

    def tenant(self, name: str) -> Tenant:
        """Raises NotThere."""
        _check_name("tenant", name)
        with self._engine.connect() as connection:
            row = connection.execute(select(tables.tenants).where(tables.tenants.c.name == name)).one_or_none()
        if row is None:
            raise NotThere(f"There is no tenant {name!r}.")
        return _tenant(row)

    def keys(self, tenant: str | None = None) -> list[Key]:
        """Of one tenant or of all, the oldest first."""
        wanted = select(tables.keys).order_by(tables.keys.c.created_at, tables.keys.c.id)
        if tenant is not None:
            wanted = wanted.where(tables.keys.c.tenant == tenant)
        with self._engine.connect() as connection:
            return [_key(row) for row in connection.execute(wanted)]

    def key(self, key_id: str) -> Key:
        """Raises NotThere."""
        _check_name("key", key_id)
        with self._engine.connect() as connection:
            return _key_named(connection, key_id)

    def events(self, *, after: int = 0, most: int = 1000) -> list[Event]:
        """Those behind the event of that number, the oldest first."""
        wanted = select(tables.events).where(tables.events.c.id > after).order_by(tables.events.c.id).limit(most)
        with self._engine.connect() as connection:
            return [Event(**row._mapping) for row in connection.execute(wanted)]

    def add_tenant(self, tenant: Tenant, by: Author) -> None:
        """Raises TenancyError where the name is taken."""
        self.change_tenants(by, added=[tenant])

    def set_tenant(self, tenant: Tenant, by: Author) -> None:
        """Put another in the place of the one of that name. Raises NotThere."""
        self.change_tenants(by, changed=[tenant])

    def remove_tenant(self, name: str, by: Author) -> None:
        """With all of its keys. Raises NotThere."""
        self.change_tenants(by, removed=[name])

    def change_tenants(
        self, by: Author, *, added: Sequence[Tenant] = (), changed: Sequence[Tenant] = (), removed: Sequence[str] = ()
    ) -> None:
        """All of it, each with an event of its own, or nothing. Raises as what is done to one."""
        for name in removed:
            _check_name("tenant", name)
        if not (added or changed or removed):
            return
        with self._growing() as connection:
            for tenant in added:
                _add_tenant(connection, tenant)
                _note(connection, by, ADDED, tenant.name, told_of(tenant))
            for tenant in changed:
                _set_tenant(connection, tenant)
                _note(connection, by, "set tenant", tenant.name, told_of(tenant))
            for name in removed:
                _remove_tenant(connection, name)
                _note(connection, by, "remove tenant", name, {})

    def add_key(self, key: Key, by: Author) -> None:
        """Raises NotThere where there is no such tenant."""
        _check_name("tenant", key.tenant)
        columns = {column.name: getattr(key, column.name) for column in tables.keys.columns}
        details = {"tenant": key.tenant, "scopes": sorted(key.scopes), "expires_at": key.expires_at}
        try:
            with self._changing(by, "create key", key.id, details) as connection:
                connection.execute(insert(tables.keys), [{**columns, "scopes": sorted(key.scopes)}])
        except IntegrityError:
            raise NotThere(f"There is no tenant {key.tenant!r}.") from None

    def end_key(self, key_id: str, until: float, by: Author) -> Key:
        """Let a key be good for nothing from that time on (Unix seconds), or from an earlier one that was set.

        Returns it as it was. Raises NotThere.
        """
        _check_name("key", key_id)
        details: dict[str, object] = {}
        with self._changing(by, "end key", key_id, details) as connection:
            key = _key_named(connection, key_id)
            until = until if key.revoked_at is None else min(until, key.revoked_at)
            details["revoked_at"] = until
            connection.execute(update(tables.keys).where(tables.keys.c.id == key_id).values(revoked_at=until))
        return key

    def _schema(self) -> int:
        with self._engine.connect() as connection:
            return _fact(connection, "schema")

    def _create(self) -> int:
        with tables.creating(self._engine) as connection:
            if not _fact(connection, "schema"):
                rows = [{"name": "schema", "value": tables.SCHEMA}, {"name": "version", "value": 1}]
                connection.execute(insert(tables.facts), rows)
            return _fact(connection, "schema")

    @contextmanager
    def _changing(self, by: Author, action: str, subject: str, details: Mapping[str, object]) -> Iterator[Connection]:
        with self._growing() as connection:
            yield connection
            _note(connection, by, action, subject, details)

    @contextmanager
    def _growing(self) -> Iterator[Connection]:
        """A transaction of a new version."""
        version = tables.facts.c.name == "version"
        with self._engine.begin() as connection:
            connection.execute(update(tables.facts).where(version).values(value=tables.facts.c.value + 1))
            yield connection


def _prepare_sqlite(connection: Any, _: object) -> None:
    """Readers and a writer beside each other (https://sqlite.org/wal.html), and references that are kept."""
    for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", "journal_mode=WAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _fact(connection: Connection, name: str) -> int:
    return connection.execute(select(tables.facts.c.value).where(tables.facts.c.name == name)).scalar() or 0


def _note(connection: Connection, by: Author, action: str, subject: str, details: Mapping[str, object]) -> None:
    row = {"at": by.at, "actor": by.name, "action": action, "subject": subject, "details": dict(details)}
    connection.execute(insert(tables.events), [row])


def _add_tenant(connection: Connection, tenant: Tenant) -> None:
    try:
        connection.execute(insert(tables.tenants), [{"name": tenant.name, "declared": told_of(tenant)}])
    except IntegrityError:
        raise TenancyError(f"There is a tenant {tenant.name!r} already.") from None


def _added(connection: Connection) -> dict[str, int]:
    """The number of the event by which each tenant was added last."""
    events = tables.events.c
    number = func.max(events.id).label("number")
    wanted = select(events.subject, number).where(events.action == ADDED).group_by(events.subject)
    return {row.subject: row.number for row in connection.execute(wanted)}


def _set_tenant(connection: Connection, tenant: Tenant) -> None:
    wanted = update(tables.tenants).where(tables.tenants.c.name == tenant.name)
    if not connection.execute(wanted.values(declared=told_of(tenant))).rowcount:
        raise NotThere(f"There is no tenant {tenant.name!r}.")


def _remove_tenant(connection: Connection, name: str) -> None:
    if not connection.execute(delete(tables.tenants).where(tables.tenants.c.name == name)).rowcount:
        raise NotThere(f"There is no tenant {name!r}.")


def _tenant(row: Row[Any]) -> Tenant:
    return tenant_from(row.declared)


def _check_name(kind: str, name: str) -> None:
    """Raise NotThere for what no database may be asked for, as half a character, or NUL."""
    if not is_name(name):
        raise NotThere(f"There is no {kind} {name[: tables.MAX_NAME_CHARS]!a}.")


def _key_named(connection: Connection, key_id: str) -> Key:
    row = connection.execute(select(tables.keys).where(tables.keys.c.id == key_id)).one_or_none()
    if row is None:
        raise NotThere(f"There is no key {key_id!r}.")
    return _key(row)


def _key(row: Row[Any]) -> Key:
    return Key(
        id=row.id,
        tenant=row.tenant,
        digest=row.digest,
        scopes=frozenset(map(Scope, row.scopes)),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )
