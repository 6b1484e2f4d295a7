"""The tables in which tenants and keys are kept."""

from __future__ import annotations

from sqlalchemy import Column, Float, ForeignKey, Integer, MetaData, String, Table
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
"""`schema`, and `version`, which grows with every change."""

tenants = Table(
    "tenants",
    metadata,
    Column("name", String(MAX_NAME_CHARS), primary_key=True),
    Column("models", JSON, nullable=False),
    Column("max_n", Integer),
    Column("cache_group", String(MAX_NAME_CHARS)),
)

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
