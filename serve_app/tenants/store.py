"""Keeps tenants, keys and events in a database: SQLite for one machine, PostgreSQL where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, Row, create_engine, delete, event, func, insert, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from serve_app.core.tenants import Scope, Tenant
from serve_app.tenants import tables
from serve_app.tenants.declaration import is_name, tenant_from, told_of
from serve_app.tenants.errors import NotThere, StoreUnavailable, TenancyError, unopened
from serve_app.tenants.keys import Directory, Key, fingerprint_of

BUSY_TIMEOUT_MS = 10_000
STILL_S = 30
"""For so long at most a transaction stands still, as that of a host that died; PostgreSQL ends it then."""
LIVENESS: Mapping[str, int] = {
    "connect_timeout": 5,  # seconds, for each host of the URL
    "keepalives": 1,
    "keepalives_idle": 5,  # seconds, as the next one
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}
"""How a connection notices that PostgreSQL's host is gone, in libpq's words; by itself TCP tries for a quarter of an
hour. What the URL or PGCONNECT_TIMEOUT says counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change that was made."""

    id: int
    at: float
    actor: str
    action: str
    subject: str
    details: Mapping[str, object]


class Opened:
    """A file of SQLite that is open: no other is opened or made in its place.

    SQLite itself goes on with one that was moved away, and begins an empty one where it is opened again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.resolve()
        self._number = self._file.stat().st_ino

    def check(self, *_: object) -> None:
        """Raises StoreUnavailable where it was moved, removed or replaced."""
        try:
            is_there = self._file.stat().st_ino == self._number
        except OSError:
            is_there = False
        if not is_there:
            message = (
                f"{self._file.name}, the store of tenants, was moved, removed or replaced while it was open. Put it"
                " back, or start the service again to use what is there."
            )
            raise StoreUnavailable(message, message)


class TenantStore:
    """url: as SQLAlchemy reads it, `sqlite:///serve_app.db` or `postgresql+psycopg://…`

    is_made: whether tables are made where there are none; where not, nothing is written by opening it

    Several processes may have the same store open. Every change is one transaction, with its event, and makes
    `version` grow. Raises TenancyError where there is no database, or one of another schema.
    """

    def __init__(self, url: str, *, is_made: bool = True) -> None:
        self.engine = engine_of(url)
        if is_made and self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _prepare_sqlite)
        if self.engine.dialect.name == "postgresql":
            event.listen(self.engine, "connect", _prepare_postgresql)
        try:
            schema = self._create() if is_made else self._schema()
            if schema != tables.SCHEMA:
                raise TenancyError(f"The store of tenants has schema {schema}; this version reads {tables.SCHEMA}.")
        except BaseException as error:
            self.close()
            if isinstance(error, SQLAlchemyError):
                raise unopened(error) from error
            raise
        if (file := file_of(self.engine.url)) is not None:
            place = Opened(file)
            for moment in ("do_connect", "checkout"):
                event.listen(self.engine, moment, place.check)

    @contextmanager
    def growing(self) -> Iterator[Connection]:
        """Begin a transaction that makes a new version; nobody else changes meanwhile what is read in it."""
        version = tables.facts.c.name == "version"
        with self.engine.begin() as connection:
            connection.execute(update(tables.facts).where(version).values(value=tables.facts.c.value + 1))
            yield connection

    def close(self) -> None:
        self.engine.dispose()

    @property
    def version(self) -> int:
        """Of what is kept now."""
        with self.engine.connect() as connection:
            return fact(connection, "version")

    @property
    def pepper(self) -> int:
        """The fingerprint of the one that keys are made under; 0 where none was used yet."""
        with self.engine.connect() as connection:
            return fact(connection, "pepper")

    def use_pepper(self, pepper: bytes) -> None:
        """Raises TenancyError where keys were made under another one, as none of them would open the door."""
        with self.engine.begin() as connection:
            known = fact(connection, "pepper")
            if not known:
                row = {"name": "pepper", "value": fingerprint_of(pepper)}
                connection.execute(insert(tables.facts), [row])
        if known and known != fingerprint_of(pepper):
            raise TenancyError("This is not the pepper that the keys of the store were made under.")

    def directory(self, pepper: bytes) -> Directory:
        """Everything as it is at one moment."""
        with self.engine.connect() as connection:
            version = fact(connection, "version")  # first: what changes meanwhile is looked at again
            rows, keys = connection.execute(select(tables.tenants)).all(), connection.execute(select(tables.keys)).all()
            added = when_added(connection)
        tenants = [replace(tenant_from(row.declared), added=added.get(row.name, 0)) for row in rows]
        return Directory(tenants, map(key_of, keys), pepper=pepper, version=version)

    def tenants(self) -> list[Tenant]:
        """All of them, by name."""
        with self.engine.connect() as connection:
            rows = connection.execute(select(tables.tenants.c.declared).order_by(tables.tenants.c.name))
            return [tenant_from(row.declared) for row in rows]

    def tenant(self, name: str) -> Tenant:
        """Raises NotThere."""
        with self.engine.connect() as connection:
            return tenant_named(connection, name)

    def keys(self, tenant: str | None = None) -> list[Key]:
        """Of one tenant or of all, the oldest first."""
        wanted = select(tables.keys).order_by(tables.keys.c.created_at, tables.keys.c.id)
        if tenant is not None:
            wanted = wanted.where(tables.keys.c.tenant == tenant)
        with self.engine.connect() as connection:
            return [key_of(row) for row in connection.execute(wanted)]

    def key(self, key_id: str) -> Key:
        """Raises NotThere."""
        with self.engine.connect() as connection:
            return key_named(connection, key_id)

    def events(self, *, after: int = 0, most: int = 1000) -> list[Event]:
        """Those behind the event of that number, the oldest first."""
        wanted = select(tables.events).where(tables.events.c.id > after).order_by(tables.events.c.id).limit(most)
        with self.engine.connect() as connection:
            return [Event(**row) for row in connection.execute(wanted).mappings()]

    def change_tenant(self, name: str, change: Callable[[Tenant], Tenant], by: Author) -> Tenant:
        """Put what is made of a tenant in its place; nobody changes it meanwhile.

        Raises NotThere, and what making it raises.
        """
        with self.growing() as connection:
            tenant = change(tenant_named(connection, name))
            set_tenant(connection, tenant, by)
        return tenant

    def change_tenants(
        self,
        by: Author,
        *,
        added: Sequence[Tenant] = (),
        changed: Sequence[Tenant] = (),
        removed: Sequence[str] = (),
        version: int | None = None,
    ) -> None:
        """All of it, each with an event of its own, or nothing. Raises TenancyError for a name that is taken, NotThere.

        removed: with all of their keys
        version: that this was made for; of another nothing is changed. None is any
        """
        if not (added or changed or removed):
            return
        with self.growing() as connection:
            if version is not None and fact(connection, "version") != version + 1:
                raise TenancyError("The tenants were changed meanwhile, and nothing was done; try again.")
            for tenant in added:
                try:
                    connection.execute(insert(tables.tenants), [{"name": tenant.name, "declared": told_of(tenant)}])
                except IntegrityError:
                    raise TenancyError(f"There is a tenant {tenant.name!r} already.") from None
                note(connection, by, ADDED, tenant.name, told_of(tenant))
            for tenant in changed:
                set_tenant(connection, tenant, by)
            for name in removed:
                tenant_named(connection, name)
                connection.execute(delete(tables.tenants).where(tables.tenants.c.name == name))
                note(connection, by, "remove tenant", name, {})

    def add_key(self, key: Key, by: Author) -> None:
        """Raises NotThere where there is no such tenant."""
        check_name("tenant", key.tenant)
        try:
            with self.growing() as connection:
                add_key(connection, key, by)
        except IntegrityError:
            raise NotThere(f"There is no tenant {key.tenant!r}.") from None

    def end_key(self, key_id: str, until: float, by: Author) -> None:
        """Let a key be good for nothing from that time on (Unix seconds), or from an earlier one that was set.

        Raises NotThere.
        """
        with self.growing() as connection:
            end_key(connection, key_named(connection, key_id), until, by, {})

    def replace_key(self, key_id: str, successor: Callable[[Key], Key], until: float, by: Author) -> Key:
        """Put a key beside another one, which is good until then (Unix seconds); nobody changes that one meanwhile.

        successor: makes it of the old one. Raises NotThere, and what that raises.
        """
        with self.growing() as connection:
            old = key_named(connection, key_id)
            new = successor(old)
            add_key(connection, new, by)
            end_key(connection, old, until, by, {"replaced_by": new.id})
        return new

    def _schema(self) -> int:
        with self.engine.connect() as connection:
            return fact(connection, "schema")

    def _create(self) -> int:
        with tables.creating(self.engine) as connection:
            if not fact(connection, "schema"):
                rows = [{"name": "schema", "value": tables.SCHEMA}, {"name": "version", "value": 1}]
                connection.execute(insert(tables.facts), rows)
            return fact(connection, "schema")


def engine_of(url: str) -> Engine:
    """Return the engine of a store's URL; nothing is opened yet. Raises TenancyError."""
    try:
        parsed = make_url(url)
        is_libpq = parsed.get_driver_name().startswith("psycopg")
        chosen = {*parsed.query, *(["connect_timeout"] if "PGCONNECT_TIMEOUT" in os.environ else [])}
        limits = {name: value for name, value in LIVENESS.items() if is_libpq and name not in chosen}
        return create_engine(parsed, connect_args=limits, pool_pre_ping=True, hide_parameters=True)  # it may begin anew
    except (SQLAlchemyError, ImportError) as error:
        raise unopened(error) from error


def file_of(url: URL) -> Path | None:
    """Return the file of SQLite; None where nothing of it is on a disk."""
    is_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
    return Path(str(url.database)) if is_file else None


def _prepare_sqlite(connection: Any, _: object) -> None:
    """Readers and a writer beside each other (https://sqlite.org/wal.html), and references that are kept."""
    for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", "journal_mode=WAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _prepare_postgresql(connection: Any, _: object) -> None:
    """What a host locked that died without a word, others wait for: by itself, the server would notice in two hours."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{STILL_S}s'")
    connection.commit()


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


def when_added(connection: Connection) -> dict[str, int]:
    """The number of the event by which each tenant was added last."""
    events = tables.events.c
    number = func.max(events.id).label("number")
    wanted = select(events.subject, number).where(events.action == ADDED).group_by(events.subject)
    return {row.subject: row.number for row in connection.execute(wanted)}


def set_tenant(connection: Connection, tenant: Tenant, by: Author) -> None:
    wanted = update(tables.tenants).where(tables.tenants.c.name == tenant.name)
    if not connection.execute(wanted.values(declared=told_of(tenant))).rowcount:
        raise NotThere(f"There is no tenant {tenant.name!r}.")
    note(connection, by, "set tenant", tenant.name, told_of(tenant))


def tenant_named(connection: Connection, name: str) -> Tenant:
    check_name("tenant", name)
    row = connection.execute(select(tables.tenants).where(tables.tenants.c.name == name)).one_or_none()
    if row is None:
        raise NotThere(f"There is no tenant {name!r}.")
    return tenant_from(row.declared)


def add_key(connection: Connection, key: Key, by: Author) -> None:
    columns = {column.name: getattr(key, column.name) for column in tables.keys.columns}
    connection.execute(insert(tables.keys), [{**columns, "scopes": sorted(key.scopes)}])
    details = {"tenant": key.tenant, "scopes": sorted(key.scopes), "expires_at": key.expires_at}
    note(connection, by, "create key", key.id, details)


def end_key(connection: Connection, key: Key, until: float, by: Author, details: Mapping[str, object]) -> None:
    until = until if key.revoked_at is None else min(until, key.revoked_at)
    connection.execute(update(tables.keys).where(tables.keys.c.id == key.id).values(revoked_at=until))
    note(connection, by, "end key", key.id, {"revoked_at": until, **details})


def check_name(kind: str, name: str) -> None:
    """Raise NotThere for what no database may be asked for, as half a character, or NUL."""
    if not is_name(name):
        raise NotThere(f"There is no {kind} {name[: tables.MAX_NAME_CHARS]!a}.")


def key_named(connection: Connection, key_id: str) -> Key:
    check_name("key", key_id)
    row = connection.execute(select(tables.keys).where(tables.keys.c.id == key_id)).one_or_none()
    if row is None:
        raise NotThere(f"There is no key {key_id!r}.")
    return key_of(row)


def key_of(row: Row[Any]) -> Key:
    return Key(**row._asdict() | {"scopes": frozenset(map(Scope, row.scopes))})
