"""The tables in which tenants, keys and what was done to them are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import (
    DDL,
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    event,
)
from sqlalchemy.types import JSON

from serve_app.core.ledger import SUMS

ALONE = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "SELECT pg_advisory_xact_lock(5432015)"}
"""Lets one process after the other do what reads first and writes then, or makes what is not there."""
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

MAX_PATH_CHARS = 4096
published = Table(
    "published_adapters",
    metadata,
    Column("base", String(MAX_NAME_CHARS), primary_key=True),
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("version", String(128)),
    Column("path", String(MAX_PATH_CHARS)),
    Column("previous_version", String(128)),
    Column("previous_path", String(MAX_PATH_CHARS)),
    Column("published_at", Float, nullable=False),
    Column("by", String(MAX_NAME_CHARS), nullable=False),
)
"""What the names of adapters mean. One without a version was withdrawn: it is not served from a folder either."""

canaries = Table(
    "adapter_canaries",
    metadata,
    Column("base", String(MAX_NAME_CHARS), primary_key=True),
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("version", String(128), nullable=False),
    Column("path", String(MAX_PATH_CHARS), nullable=False),
    Column("share", Float, nullable=False),
    Column("since", Float, nullable=False),
    Column("by", String(MAX_NAME_CHARS), nullable=False),
)
"""Versions that are tried beside published ones."""
OF_ADAPTERS = (published, canaries)

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
def alone(engine: Engine) -> Iterator[Connection]:
    """A transaction that begins when no other of this kind runs, of whichever process."""
    with engine.begin() as connection:
        connection.exec_driver_sql(ALONE.get(engine.dialect.name, "SELECT 1"))
        yield connection


@contextmanager
def creating(engine: Engine) -> Iterator[Connection]:
    """A transaction in which every table is there, whoever else begins at the same time."""
    with alone(engine) as connection:
        metadata.create_all(connection)
        yield connection


MAX_ID_CHARS = 160
SPENT = ("prompt_tokens", "cached_tokens", "completion_tokens", "engine_ns")
"""What a replica counts, too."""

LENGTHS = {
    "tenant": MAX_NAME_CHARS,
    "key_id": 32,
    "request_id": MAX_ID_CHARS,
    "model": MAX_NAME_CHARS,
    "adapter": 512,
    "version": 128,
}
"""Characters of each text. What is longer is cut: a database might refuse it, and all that came with it."""
MAX_AMOUNT = 2**53
"""Of one row, so that sums of a thousand still are numbers of the database."""

rows = Table(
    "ledger",
    metadata,
    Column("id", String(MAX_ID_CHARS), primary_key=True),
    Column("day", String(10), nullable=False),
    *(Column(name, String(length), nullable=False) for name, length in LENGTHS.items()),
    *(Column(name, Float, nullable=False) for name in ("at", "queue_s", "prefill_s", "decode_s")),
    *(Column(name, BigInteger, nullable=False) for name in (*SPENT, "cost")),
    *(Column(name, Integer, nullable=False) for name in ("choices", "status")),
)

days = Table(
    "days",
    metadata,
    Column("day", String(10), primary_key=True),
    Column("tenant", String(MAX_NAME_CHARS), primary_key=True),
    Column("model", String(MAX_NAME_CHARS), primary_key=True),
    Column("adapter", String(512), primary_key=True),
    Column("key_id", String(32), primary_key=True),
    *(Column(name, BigInteger, nullable=False) for name in SUMS),
)
"""Sums of the rows; beside them, with the key id `unattributed`, what replicas spent and no row explains."""

counted = Table(
    "counted",
    metadata,
    Column("replica_id", String(MAX_ID_CHARS), primary_key=True),
    Column("flow", String(MAX_NAME_CHARS), primary_key=True),
    Column("model", String(MAX_NAME_CHARS), nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in SPENT),
)

replicas = Table(
    "replicas",
    metadata,
    Column("replica_id", String(MAX_ID_CHARS), primary_key=True),
    Column("day", String(10), nullable=False),
)
"""Those that counted something, and the last day on which they were heard of, or that they are forgotten."""
FORGOTTEN = ""
"""In the place of the day: what this one counted is in the totals alone."""

totals = Table(
    "totals",
    metadata,
    Column("tenant", String(MAX_NAME_CHARS), primary_key=True),
    Column("model", String(MAX_NAME_CHARS), primary_key=True),
    Column("side", String(8), primary_key=True),
    *(Column(name, BigInteger, nullable=False) for name in SPENT),
)
"""Sums over all time: side `counted` of what replicas counted, `told` of the rows and of what was unattributed."""


files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False, index=True),
    Column("filename", String(255), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
)
"""What is in the folder of files, by the names there. A file there without a row is nobody's."""

OF_BATCH = ("completed", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")
"""What of a batch's lines is added up."""

batches = Table(
    "batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False, index=True),
    Column("key_id", String(32), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("outcome", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("model", String(512), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("total", Integer, nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in OF_BATCH),
    Column("told", JSON, nullable=False),
)
"""told: what else its object shows: times, metadata, errors and files"""

lines = Table(
    "batch_lines",
    metadata,
    Column("batch", ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("status", Integer),
    Column("text", Text),
    Index("of_batch_by_status", "batch", "status"),
)
"""Requests of open batches: where each stands in the input file, and its result, which is written once."""
