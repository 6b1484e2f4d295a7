"""Which mixes of adapters have lines of their own among the ledger's sums by day."""

from __future__ import annotations

from sqlalchemy import Connection, select

from serve_app.core.ledger import OTHER_MIXES
from serve_app.tenants import ledger_tables as tables

MAX_MIXES = 64
"""Of a tenant on one model, that have a line of their own in a day."""

Key = tuple[str, ...]


class Mixes:
    """As one transaction finds and makes them.

    Adapters are as many as an administrator has registered, mixes as many as there are numbers: beyond the first ones
    of a day, all of a tenant's on one model share a line. Rows keep the whole name.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[Key, set[str]] = {}

    def line_of(self, place: Key, adapter: str) -> str:
        """place: day, tenant and model"""
        if not _is_mix(adapter):
            return adapter
        if place not in self._known:
            self._known[place] = self._found(place)
        known = self._known[place]
        if adapter not in known and len(known) >= MAX_MIXES:
            return OTHER_MIXES
        known.add(adapter)
        return adapter

    def _found(self, place: Key) -> set[str]:
        days = tables.days.c
        day, tenant, model = place
        wanted = select(days.adapter).distinct().where(days.day == day, days.tenant == tenant, days.model == model)
        return {adapter for (adapter,) in self._connection.execute(wanted) if _is_mix(adapter)} - {OTHER_MIXES}


def _is_mix(adapter: str) -> bool:
    """Names of adapters have neither sign."""
    return "*" in adapter or "+" in adapter
