"""The tables in which tenants, keys and what was done to them are kept."""

from __future__ import annotations

from sqlalchemy import DDL, Column, Float, ForeignKey, Integer, MetaData, String, Table, event
from sqlalchemy.types import JSON

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
