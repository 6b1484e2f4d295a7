"""The tables in which the ledger is kept: rows, their sums by day, and what replicas counted."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Integer, String, Table

from serve_app.core.ledger import SUMS
from serve_app.tenants.tables import MAX_NAME_CHARS, metadata

MAX_ID_CHARS = 160
SPENT = ("prompt_tokens", "cached_tokens", "completion_tokens", "engine_ns")
"""What a replica counts, too."""

rows = Table(
    "ledger",
    metadata,
    Column("id", String(MAX_ID_CHARS), primary_key=True),
    Column("day", String(10), nullable=False),
    Column("tenant", String(MAX_NAME_CHARS), nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("request_id", String(MAX_ID_CHARS), nullable=False),
    Column("model", String(MAX_NAME_CHARS), nullable=False),
    Column("adapter", String(512), nullable=False),
    Column("version", String(128), nullable=False),
    Column("at", Float, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("choices", Integer, nullable=False),
    Column("queue_s", Float, nullable=False),
    Column("prefill_s", Float, nullable=False),
    Column("decode_s", Float, nullable=False),
    Column("engine_ns", BigInteger, nullable=False),
    Column("cost", BigInteger, nullable=False),
    Column("status", Integer, nullable=False),
)

LENGTHS = {
    column.name: column.type.length
    for column in rows.columns
    if isinstance(column.type, String) and column.type.length is not None and column.name not in ("id", "day")
}
"""Characters of each text. What is longer is cut: a database might refuse it, and all that came with it."""
MAX_AMOUNT = 2**53
"""Of one row, so that sums of a thousand still are numbers of the database."""

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
