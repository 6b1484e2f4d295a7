"""Keeps tenants and keys in a database: SQLite for one machine, PostgreSQL where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Row, create_engine, delete, event, insert, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from serve_app.core.tenants import Rights, Scope, Tenant
from serve_app.tenants import tables
from serve_app.tenants.directory import Directory
from serve_app.tenants.errors import TenancyError
from serve_app.tenants.keys import Key

BUSY_TIMEOUT_MS = 10_000


class TenantStore:
    """url: as SQLAlchemy reads it, `sqlite:///serve_app.db` or `postgresql+psycopg://…`

    Several processes may have the same store open. Every change is one transaction and makes `version` grow.
    Raises TenancyError where there is no database, or one of another schema.
    """

    def __init__(self, url: str) -> None:
        try:
            self._engine = create_engine(url)
            if self._engine.dialect.name == "sqlite":
                event.listen(self._engine, "connect", _prepare_sqlite)
            self._create()
        except (SQLAlchemyError, ImportError) as error:
            raise TenancyError(f"The store of tenants cannot be opened: {_reason(error)}.") from error

    def close(self) -> None:
        self._engine.dispose()

    @property
    def version(self) -> int:
        """Of what is kept now."""
        with self._engine.connect() as connection:
            return _fact(connection, "version")

    def directory(self, pepper: bytes) -> Directory:
        """Everything as it is at one moment."""
        with self._engine.connect() as connection:
            version = _fact(connection, "version")  # first: what changes meanwhile is looked at again
            found = connection.execute(select(tables.tenants)).all(), connection.execute(select(tables.keys)).all()
        return Directory(map(_tenant, found[0]), map(_key, found[1]), pepper=pepper, version=version)

    def tenants(self) -> list[Tenant]:
        """All of them, by name."""
        with self._engine.connect() as connection:
            return [_tenant(row) for row in connection.execute(select(tables.tenants).order_by(tables.tenants.c.name))]

    def keys(self, tenant: str | None = None) -> list[Key]:
        """Of one tenant or of all, the oldest first."""
        wanted = select(tables.keys).order_by(tables.keys.c.created_at, tables.keys.c.id)
        if tenant is not None:
            wanted = wanted.where(tables.keys.c.tenant == tenant)
        with self._engine.connect() as connection:
            return [_key(row) for row in connection.execute(wanted)]

    def key(self, key_id: str) -> Key:
        """Raises TenancyError where there is none."""
        with self._engine.connect() as connection:
            return _key_named(connection, key_id)

    def add_tenant(self, tenant: Tenant) -> None:
        """Raises TenancyError where the name is taken."""
        try:
            with self._changing() as connection:
                connection.execute(insert(tables.tenants).values(_columns(tenant)))
        except IntegrityError:
            raise TenancyError(f"There is a tenant {tenant.name!r} already.") from None

    def set_tenant(self, tenant: Tenant) -> None:
        """Put another in the place of the one of that name. Raises TenancyError where there is none."""
        with self._changing() as connection:
            wanted = update(tables.tenants).where(tables.tenants.c.name == tenant.name)
            if not connection.execute(wanted.values(_columns(tenant))).rowcount:
                raise TenancyError(f"There is no tenant {tenant.name!r}.")

    def remove_tenant(self, name: str) -> None:
        """With all of its keys. Raises TenancyError where there is none."""
        with self._changing() as connection:
            if not connection.execute(delete(tables.tenants).where(tables.tenants.c.name == name)).rowcount:
                raise TenancyError(f"There is no tenant {name!r}.")

    def add_key(self, key: Key) -> None:
        """Raises TenancyError where there is no such tenant."""
        columns = {column.name: getattr(key, column.name) for column in tables.keys.columns}
        try:
            with self._changing() as connection:
                connection.execute(insert(tables.keys).values({**columns, "scopes": sorted(key.scopes)}))
        except IntegrityError:
            raise TenancyError(f"There is no tenant {key.tenant!r}.") from None

    def end_key(self, key_id: str, at: float) -> Key:
        """Let a key be good for nothing from that time on (Unix seconds), or from an earlier one that was set.

        Returns it as it was. Raises TenancyError where there is none.
        """
        with self._changing() as connection:
            key = _key_named(connection, key_id)
            until = at if key.revoked_at is None else min(at, key.revoked_at)
            connection.execute(update(tables.keys).where(tables.keys.c.id == key_id).values(revoked_at=until))
        return key

    def _create(self) -> None:
        tables.metadata.create_all(self._engine)
        with self._engine.begin() as connection:
            if not _fact(connection, "schema"):
                rows = [{"name": "schema", "value": tables.SCHEMA}, {"name": "version", "value": 1}]
                connection.execute(insert(tables.facts), rows)
            schema = _fact(connection, "schema")
        if schema != tables.SCHEMA:
            raise TenancyError(f"The store of tenants has schema {schema}; this version reads {tables.SCHEMA}.")

    @contextmanager
    def _changing(self) -> Iterator[Connection]:
        version = tables.facts.c.name == "version"
        with self._engine.begin() as connection:
            connection.execute(update(tables.facts).where(version).values(value=tables.facts.c.value + 1))
            yield connection


def _prepare_sqlite(connection: Any, _: object) -> None:
    """Readers and a writer beside each other (https://sqlite.org/wal.html), and references that are kept."""
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        connection.execute(f"PRAGMA {pragma}")


def _fact(connection: Connection, name: str) -> int:
    return connection.execute(select(tables.facts.c.value).where(tables.facts.c.name == name)).scalar() or 0


def _key_named(connection: Connection, key_id: str) -> Key:
    row = connection.execute(select(tables.keys).where(tables.keys.c.id == key_id)).one_or_none()
    if row is None:
        raise TenancyError(f"There is no key {key_id!r}.")
    return _key(row)


def _columns(tenant: Tenant) -> dict[str, object]:
    return {
        "name": tenant.name,
        "models": list(tenant.rights.patterns),
        "max_n": tenant.max_n,
        "cache_group": tenant.cache_group,
    }


def _tenant(row: Row[Any]) -> Tenant:
    return Tenant(
        name=row.name,
        rights=Rights(tuple(row.models)),
        max_n=row.max_n,
        cache_group=row.cache_group,
    )


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


def _reason(error: Exception) -> str:
    """What the driver says, without the statement and the address, which may hold a password."""
    return str(getattr(error, "orig", None) or type(error).__name__).strip().splitlines()[0].rstrip(".")
