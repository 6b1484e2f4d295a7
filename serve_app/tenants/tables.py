"""The tables in which tenants, keys and what was done to them are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import DDL, Column, Connection, Engine, Float, ForeignKey, Integer, MetaData, String, Table, event
from sqlalchemy.types import JSON

ALONE = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "SELECT pg_advisory_xact_lock(5432015)"}
"""Lets one process after the other make what is not there."""
SCHEMA = 1
"""Of these tables; a store of another one is refused."""
MAX_NAME_CHARS = 96

metadata = MetaData()

facts = Table(
    "facts",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", Integer, nullable=False),
)
"""`schema`; `version`, which grows with every change; `pepper`, by which another one is told from the right one."""

tenants = Table(
    "tenants",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("declared", JSON, nullable=False),
)
"""declared: all of the tenant, as `serve_app.tenants.declaration` reads it"""

keys = Table(
    "keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant", ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False, index=True),
    Column("digest", String(64), nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("actor", String(MAX_NAME_CHARS), nullable=False),
    Column("action", String(32), nullable=False),
    Column("subject", String(MAX_NAME_CHARS), nullable=False),
    Column("details", JSON, nullable=False),
    sqlite_autoincrement=True,
)
"""What was changed, when and by whom: rows are added, and the database itself lets none be changed or taken out."""

REFUSED = "events are only added"
ON_SQLITE = [
    f"CREATE TRIGGER events_{verb.lower()} BEFORE {verb} ON events BEGIN SELECT RAISE(ABORT, '{REFUSED}'); END"
    for verb in ("UPDATE", "DELETE")
]
ON_POSTGRESQL = [
    "CREATE OR REPLACE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql"
    f" AS $$ BEGIN RAISE EXCEPTION '{REFUSED}'; END $$",
    *(
        f"CREATE TRIGGER events_{verb.lower()} BEFORE {verb} ON events EXECUTE FUNCTION refuse_change()"
        for verb in ("UPDATE", "DELETE", "TRUNCATE")
    ),
]
for dialect, statements in (("sqlite", ON_SQLITE), ("postgresql", ON_POSTGRESQL)):
    for statement in statements:
        ddl = DDL(statement)  # type: ignore[no-untyped-call]
        event.listen(events, "after_create", ddl.execute_if(dialect=dialect))


@contextmanager
def creating(engine: Engine) -> Iterator[Connection]:
    """A transaction in which every table is there, whoever else begins at the same time."""
    with engine.begin() as connection:
        connection.exec_driver_sql(ALONE.get(engine.dialect.name, "SELECT 1"))
        metadata.create_all(connection)
        yield connection
