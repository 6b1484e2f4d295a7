"""The ledger's store: every row once, sums by day, and what no row explains written down as such."""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import date
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, Engine, Executable, Table, bindparam, delete, func, literal, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, IntegrityError

from serve_app.core.ledger import (
    DIMENSIONS,
    OTHER_MIXES,
    SUMS,
    UNATTRIBUTED,
    Counted,
    Price,
    Prices,
    Row,
    UsageLine,
    UsageQuestion,
)
from serve_app.core.tenants import NANO
from serve_app.tenants import tables
from serve_app.tenants.declaration import is_name
from serve_app.tenants.errors import TenancyError
from serve_app.tenants.lending import DAY_S, period_of

logger = logging.getLogger(__name__)

REFUSALS = (DataError, IntegrityError, UnicodeError, OverflowError)
"""Of what a row holds, and not of a database that cannot be reached or written."""
MAX_ROWS = 500
"""Kept by one statement, which is carried out or not: SQLAlchemy divides what has more values than a database takes."""

Key = tuple[str, ...]
Sums = Counter[str]


class LedgerStore:
    """A batch is one transaction: all of it is there, or nothing. Of two writers one waits for the other.

    Law: for each tenant and model, the rows and what is unattributed come to what replicas counted, always. What is
    unattributed grows with what is counted and shrinks again where a row comes that explains it; of requests that still
    run it holds what they have come to. Its cost is that of its tokens, as of the base, by the prices of when it last
    changed; where these are not known, it stays as it is.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._insert = sqlite.insert if engine.dialect.name == "sqlite" else postgresql.insert
        self._keeping = self._insert(tables.rows).on_conflict_do_nothing().returning(tables.rows.c.id)
        self._adding = functools.cache(self._adding_to)
        self._putting = functools.cache(self._putting_into)
        self._heard: dict[str, str] = {}  # the day by replica, as it was written
        with tables.creating(engine):
            pass  # whatever is not there is made

    def record(
        self,
        rows: Sequence[Row],
        counted: Sequence[Counted],
        now: float,
        *,
        prices: Prices | None = None,
        first: Callable[[Connection], Sequence[Row]] = lambda connection: (),
    ) -> int:
        """Keep them. One that is there already changes nothing, unless it tells more: of a stream that its client has
        fetched anew, each router that had it tells what it came to by then. Returns how many rows are new.

        now: Unix seconds
        first: what is done in the same transaction before; it returns further rows
        """
        with tables.alone(self.engine) as connection:
            rows = [*rows, *first(connection)]
            by_id = {row.id: row for row in sorted(map(_fitting, rows), key=lambda row: row.completion_tokens)}
            rows = list(by_id.values())
            new = self._keep_rows(connection, rows)
            grown = self._grow_rows(connection, [by_id[each] for each in by_id.keys() - {row.id for row in new}])
            self._add_days(connection, new)
            self._add_days(connection, grown, requests=0)
            self._add_totals(connection, "told", _spent_of([*new, *grown]))
            today = period_of(now, is_monthly=False)
            forgotten = self._hear(connection, {each.replica_id for each in counted}, today)
            self._add_totals(connection, "counted", self._keep_counted(connection, counted, forgotten))
            touched = {(each.tenant, each.model) for each in (*new, *grown)}
            touched |= {(each.spent.flow, each.model) for each in counted}
            for tenant, model in sorted(touched):
                lines = self._reconcile(connection, tenant, model, today)
                if prices is not None:
                    self._charge(connection, lines, prices.of(model))
        self._heard = {known: day for known, day in self._heard.items() if day == today}
        self._heard |= {each.replica_id: today for each in counted if each.replica_id not in forgotten}
        return len(new)

    def usage(self, question: UsageQuestion) -> list[UsageLine]:
        """Read from the sums by day, so that it takes no longer as rows get more."""
        days, by = tables.days.c, question.by
        columns = [days[name] for name in by]
        sums = [func.sum(days[name]).label(name) for name in SUMS]
        wanted = select(*columns, *sums).where(days.day >= question.since)
        if question.until:
            wanted = wanted.where(days.day <= question.until)
        if question.tenant is not None:
            wanted = wanted.where(days.tenant == question.tenant)
        with self.engine.connect() as connection:
            found = connection.execute(wanted.group_by(*columns).order_by(*columns)).mappings().all()
        return [
            UsageLine(by={name: str(row[name]) for name in by}, sums={name: int(row[name] or 0) for name in SUMS})
            for row in found
        ]

    def cost_of(self, tenant: str, period: str) -> int:
        """What a tenant spent within a day `2026-11-22` or a month `2026-11`, in billionths of the currency."""
        days = tables.days.c
        wanted = select(func.sum(days.cost)).where(days.tenant == tenant, days.day.startswith(period))
        with self.engine.connect() as connection:
            return int(connection.execute(wanted).scalar() or 0)

    def _keep_rows(self, connection: Connection, rows: Sequence[Row]) -> list[Row]:
        """Those of them that were not there. One that the database refuses is left out, and keeps no other out."""
        if not rows:
            return []
        if len(rows) <= MAX_ROWS:
            try:
                with self._trying(connection):
                    return self._insert_rows(connection, rows)
            except REFUSALS as error:
                if len(rows) == 1:
                    reason = type(error).__name__
                    logger.error("the database refuses row %s, which stays unattributed: %s", rows[0].id, reason)
                    return []
        half = len(rows) // 2
        return self._keep_rows(connection, rows[:half]) + self._keep_rows(connection, rows[half:])

    def _trying(self, connection: Connection) -> AbstractContextManager[object]:
        """SQLite undoes a statement that fails; elsewhere nothing more could be done in the transaction."""
        return nullcontext() if connection.dialect.name == "sqlite" else connection.begin_nested()

    def _insert_rows(self, connection: Connection, rows: Sequence[Row]) -> list[Row]:
        by_id = {row.id: row for row in rows}
        values = [asdict(row) | {"day": period_of(row.at, is_monthly=False)} for row in by_id.values()]
        return [by_id[id_] for (id_,) in connection.execute(self._keeping, values)]

    def _grow_rows(self, connection: Connection, rows: Sequence[Row]) -> list[Row]:
        """Replace rows that are there by those that tell more, at their own time; returns by how much more."""
        table, grown = tables.rows, []
        for at in range(0, len(rows), MAX_ROWS):
            by_id = {row.id: row for row in rows[at : at + MAX_ROWS]}
            known = connection.execute(select(table).where(table.c.id.in_(by_id))).mappings().all()
            for before in known:
                row = replace(by_id[before["id"]], at=before["at"])  # so that it stays a row of its day
                if row.completion_tokens > before["completion_tokens"]:
                    connection.execute(update(table).where(table.c.id == row.id).values(**asdict(row)))
                    more = {name: getattr(row, name) - before[name] for name in SUMS if name != "requests"}
                    grown.append(replace(row, **more))
        return grown

    def _hear(self, connection: Connection, replica_ids: Iterable[str], today: str) -> set[str]:
        """Note of whom was heard today; returns those of them whose counts are forgotten."""
        unsaid = sorted(each for each in replica_ids if self._heard.get(each) != today)
        replicas, forgotten = tables.replicas.c, set[str]()
        if unsaid:
            known = select(replicas.replica_id).where(replicas.replica_id.in_(unsaid), replicas.day == tables.FORGOTTEN)
            forgotten = set(connection.execute(known).scalars())
        for each in unsaid:
            if each not in forgotten:
                self._put(connection, tables.replicas, {"replica_id": each}, {"day": today})
        return forgotten

    def _keep_counted(
        self, connection: Connection, counted: Iterable[Counted], forgotten: Collection[str]
    ) -> dict[Key, Sums]:
        """What was counted beyond what was known, by tenant and model. Of what is forgotten nobody can say how much
        that is, and it was added up before: it is where growth begins anew.
        """
        growth: dict[Key, Sums] = {}
        for each in counted:
            key = {"replica_id": each.replica_id, "flow": each.spent.flow}
            before = _row_of(connection, tables.counted, key)
            if each.replica_id in forgotten and not before:
                before = Counter({name: getattr(each.spent, name) for name in tables.SPENT})
            after = {name: max(getattr(each.spent, name), before[name]) for name in tables.SPENT}
            self._put(connection, tables.counted, key, {"model": each.model, **after})
            grown = growth.setdefault((each.spent.flow, each.model), Counter())
            grown.update({name: after[name] - before[name] for name in tables.SPENT})
        return growth

    def _add_days(self, connection: Connection, rows: Iterable[Row], *, requests: int = 1) -> None:
        sums: dict[Key, Sums] = {}
        mixes = Mixes(connection)
        for row in rows:
            day = period_of(row.at, is_monthly=False)
            adapter = mixes.line_of((day, row.tenant, row.model), row.adapter)
            amounts = {name: getattr(row, name) for name in SUMS if name != "requests"}
            line = (day, row.tenant, row.model, adapter, row.key_id)
            sums.setdefault(line, Counter()).update({"requests": requests, **amounts})
        for key, amounts_of_key in sums.items():
            self._add(connection, tables.days, key, SUMS, amounts_of_key)

    def _add_totals(self, connection: Connection, side: str, sums: Mapping[Key, Sums]) -> None:
        for (tenant, model), amounts in sums.items():
            self._add(connection, tables.totals, (tenant, model, side), tables.SPENT, amounts)

    def _reconcile(self, connection: Connection, tenant: str, model: str, today: str) -> list[Key]:
        """Write what is unexplained to today; what was explained since is taken off again, from the last day on.

        Returns the lines that have changed.
        """
        sides = {
            side: _row_of(connection, tables.totals, {"tenant": tenant, "model": model, "side": side})
            for side in ("counted", "told")
        }
        gap = {name: sides["counted"][name] - sides["told"][name] for name in tables.SPENT}
        more = {name: amount for name, amount in gap.items() if amount > 0}
        key = (today, tenant, model, "", UNATTRIBUTED)
        if more:
            self._add(connection, tables.days, key, SUMS, Counter(more))
        taken, lines = self._take_back(connection, tenant, model, {name: -gap[name] for name in gap if gap[name] < 0})
        written = {name: more.get(name, 0) - taken[name] for name in tables.SPENT}
        self._add(connection, tables.totals, (tenant, model, "told"), tables.SPENT, written)
        return [key, *lines] if more else lines

    def _take_back(
        self, connection: Connection, tenant: str, model: str, excess: Mapping[str, int]
    ) -> tuple[Sums, list[Key]]:
        """Take off what is unattributed what rows explain now; what could be taken, and from which lines."""
        taken: Sums = Counter()
        lines: list[Key] = []
        if not excess:
            return taken, lines
        days = tables.days.c
        of_pair = (days.tenant == tenant, days.model == model, days.key_id == UNATTRIBUTED)
        found = connection.execute(select(tables.days).where(*of_pair).order_by(days.day.desc())).mappings().all()
        for row in found:
            amounts = {name: min(left - taken[name], row[name]) for name, left in excess.items()}
            amounts = {name: amount for name, amount in amounts.items() if amount > 0}
            if not amounts:
                continue
            taken.update(amounts)
            lines.append(tuple(str(row[column.name]) for column in tables.days.primary_key))
            self._add(connection, tables.days, lines[-1], SUMS, Counter({n: -a for n, a in amounts.items()}))
        return taken, lines

    def _charge(self, connection: Connection, lines: Iterable[Key], price: Price) -> None:
        """Have these lines cost what their tokens do."""
        names = [column.name for column in tables.days.primary_key]
        for line in dict.fromkeys(lines):
            sums = _row_of(connection, tables.days, dict(zip(names, line, strict=True)), SUMS)
            prompt, cached = sums["prompt_tokens"], min(sums["prompt_tokens"], sums["cached_tokens"])
            completion = sums["completion_tokens"]
            cost = price.cost(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)
            self._add(connection, tables.days, line, SUMS, {"cost": min(cost, tables.MAX_AMOUNT) - sums["cost"]})

    def _add(
        self, connection: Connection, table: Table, key: Key, names: Sequence[str], amounts: Mapping[str, int]
    ) -> None:
        """Add to the row of this key, which is made where there is none."""
        if not any(amounts.values()):
            return
        columns = [column.name for column in table.primary_key]
        values = dict(zip(columns, key, strict=True)) | {name: amounts.get(name, 0) for name in names}
        connection.execute(self._adding(table, tuple(names)), values)

    def _put(self, connection: Connection, table: Table, key: Mapping[str, str], values: Mapping[str, Any]) -> None:
        connection.execute(self._putting(table, tuple(key), tuple(values)), {**key, **values})

    def _adding_to(self, table: Table, names: tuple[str, ...]) -> Executable:
        """As `_add`, of a row that is given when it is carried out. To write a statement takes ten times as long."""
        statement = self._insert(table)
        added = {name: table.c[name] + statement.excluded[name] for name in names}
        return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=added)

    def _putting_into(self, table: Table, key: tuple[str, ...], names: tuple[str, ...]) -> Executable:
        statement = self._insert(table)
        put = {name: statement.excluded[name] for name in names}
        return statement.on_conflict_do_update(index_elements=list(key), set_=put)


def _fitting(row: Row) -> Row:
    """The row as every database can hold it, so that none keeps out those that come with it."""
    texts = {name: getattr(row, name) for name in tables.LENGTHS}
    amounts = {name: getattr(row, name) for name in SUMS if name != "requests"}
    cut: dict[str, Any] = {
        **{name: text[: tables.LENGTHS[name]] for name, text in texts.items() if len(text) > tables.LENGTHS[name]},
        **{name: tables.MAX_AMOUNT for name, amount in amounts.items() if amount > tables.MAX_AMOUNT},
    }
    return replace(row, **cut) if cut else row


def _row_of(connection: Connection, table: Table, key: Mapping[str, str], names: Sequence[str] = tables.SPENT) -> Sums:
    found = connection.execute(_reading(table, tuple(key)), key).mappings().one_or_none()
    return Counter() if found is None else Counter({name: int(found[name]) for name in names})


@functools.cache
def _reading(table: Table, names: tuple[str, ...]) -> Executable:
    return select(table).where(*(table.c[name] == bindparam(name) for name in names))


def _spent_of(rows: Iterable[Row]) -> dict[Key, Sums]:
    sums: dict[Key, Sums] = {}
    for row in rows:
        spent = {name: getattr(row, name) for name in tables.SPENT}
        sums.setdefault((row.tenant, row.model), Counter()).update(spent)
    return sums


MAX_MIXES = 64
"""Of a tenant on one model, that have a line of their own in a day."""


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


BATCH = 5_000
"""Rows of one transaction, so that whoever writes beside it waits for a moment alone."""


def prune(engine: Engine, *, now: float, days: int) -> int:
    """Remove the rows of requests that ended more than so many days ago; returns how many that were. What replicas
    counted that were not heard of for so long is forgotten as well: it is in the totals.

    now: Unix seconds

    A row that a router brings again after that would be taken for a new one; routers bring rows for as long as they
    live and cannot reach the store, so let days be more than that.
    """
    before = period_of(now - days * DAY_S, is_monthly=False)
    removed = 0
    while found := _remove_some(engine, before):
        removed += found
    _note_replicas(engine, period_of(now, is_monthly=False))
    while _forget_one(engine, before):
        pass
    return removed


def _remove_some(engine: Engine, before: str) -> int:
    old = select(tables.rows.c.id).where(tables.rows.c.day < before).limit(BATCH)
    with engine.begin() as connection:
        return connection.execute(delete(tables.rows).where(tables.rows.c.id.in_(old.scalar_subquery()))).rowcount


def _note_replicas(engine: Engine, today: str) -> None:
    """Those that an earlier version wrote down without the day were heard of today."""
    unknown = tables.counted.c.replica_id.not_in(select(tables.replicas.c.replica_id))
    found = select(tables.counted.c.replica_id, literal(today)).where(unknown).distinct()
    with engine.begin() as connection:
        connection.execute(tables.replicas.insert().from_select(["replica_id", "day"], found))


def _forget_one(engine: Engine, before: str) -> bool:
    """Whether there was one. That it was is kept: should it speak again, nothing is counted twice."""
    gone = (
        select(tables.replicas.c.replica_id)
        .where(tables.replicas.c.day < before, tables.replicas.c.day != tables.FORGOTTEN)
        .limit(1)
    )
    with engine.begin() as connection:
        replica_id = connection.execute(gone).scalar()
        if replica_id is None:
            return False
        connection.execute(delete(tables.counted).where(tables.counted.c.replica_id == replica_id))
        connection.execute(
            update(tables.replicas).where(tables.replicas.c.replica_id == replica_id).values(day=tables.FORGOTTEN)
        )
    return True


DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "choices")
COLUMNS: Mapping[str, str] = MappingProxyType(
    {**dict.fromkeys(COUNTS, "integer"), "engine_seconds": "number", "cost": "number"}
)
"""Behind what is asked for by, each with its type as JSON Schema has it. Cost is in the currency of the prices."""


def question_of(arguments: Mapping[str, object]) -> UsageQuestion:
    """Of `by` (names between commas), `tenant`, `since`, `until`. Raises TenancyError."""
    by = tuple(name.strip() for name in str(arguments.get("by") or "tenant,model,day").split(","))
    if not set(by) <= set(DIMENSIONS) or len(set(by)) < len(by):
        raise TenancyError(f"by must be some of {', '.join(DIMENSIONS)}, each once; found {','.join(by)[:96]!r}.")
    days = {name: str(arguments.get(name) or "") for name in ("since", "until")}
    for name, day in days.items():
        if day and not _is_day(day):
            raise TenancyError(f"{name} must be a day like 2026-11-22; found {day[:96]!r}.")
    tenant = arguments.get("tenant")
    if tenant is not None and not is_name(str(tenant)):
        raise TenancyError(f"tenant must be the name of one; found {str(tenant)[:96]!a}.")
    return UsageQuestion(by=by, tenant=None if tenant is None else str(tenant), **days)


def columns_of(question: UsageQuestion) -> dict[str, str]:
    """Names and types of what each line of a report has, also where it has none."""
    return {**dict.fromkeys(question.by, "string"), **COLUMNS}


def report_of(lines: Sequence[UsageLine]) -> list[dict[str, object]]:
    """One flat object per line."""
    return [
        {
            **line.by,
            **{name: line.sums[name] for name in COUNTS},
            "engine_seconds": line.sums["engine_ns"] / NANO,
            "cost": line.sums["cost"] / NANO,
        }
        for line in lines
    ]


def _is_day(text: str) -> bool:
    """Whether the calendar has it, written the one way in which days are compared."""
    try:
        return DAY.fullmatch(text) is not None and bool(date.fromisoformat(text))
    except ValueError:
        return False
