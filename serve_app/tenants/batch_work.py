"""Hands the lines of open batches to routers, and keeps each result once, in one transaction with its ledger rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, delete, func, insert, or_, select, update

from serve_app.core.batches import (
    FILES_DAYS,
    LOST_S,
    OK,
    OPEN_STATES,
    BatchCard,
    BatchState,
    Checked,
    Kept,
    Key,
    Line,
    NewFile,
    Result,
    Work,
)
from serve_app.core.ledger import Counted, Prices
from serve_app.core.ledger import Row as LedgerRow
from serve_app.tenants import tables
from serve_app.tenants.batch_store import enter, insert_file
from serve_app.tenants.ledger import LedgerStore
from serve_app.tenants.lending import DAY_S

Clock = Callable[[], float]
LEARNS_S = 3.0
"""For so long after a silence nothing is leased: each router says first what it holds."""
EXPIRING_S = 60.0
CHUNK = 500
LINES, BATCHES, FILES = tables.lines.c, tables.batches.c, tables.files.c


class BatchWork:
    """Has one caller at a time. Leases are in memory alone, by a clock that nobody sets; results are in the store.

    A router that asks says what it holds. What it no longer names, or what it held when it fell silent, is leased anew;
    two results of a line may come then, and the first is kept. After a silence of everybody, as after a restart, what
    is held is learned before anything is leased.

    clock: seconds, monotonic;  wall: seconds since 1970
    files_days: after which a file expires that says nothing else, and an ended batch is forgotten
    """

    def __init__(self, ledger: LedgerStore, *, clock: Clock, wall: Clock, files_days: int = FILES_DAYS) -> None:
        self._ledger, self._engine = ledger, ledger.engine
        self._clock, self._wall, self._files_days = clock, wall, files_days
        self._leases: dict[Key, tuple[str, float]] = {}
        self._asked_at = self._learned_at = self._expired_at = -math.inf

    def work(
        self,
        router_id: str,
        held: Sequence[Key],
        wanted: Mapping[str, int],
        results: Sequence[Result] = (),
        counted: Sequence[Counted] = (),
        prices: Prices | None = None,
    ) -> Work:
        """Keep results, and lease a router further lines.

        held: lines that the router still has, those of `results` included;  wanted: how many more it takes, by batch
        """
        if results:
            self._keep(results, counted, prices)
        now = self._renewed(router_id, {*held} - {(each.batch, each.number) for each in results})
        if now >= self._expired_at + EXPIRING_S:
            self._expired_at = now
            self._expire()
        open_ = select(tables.batches).where(BATCHES.state.in_(OPEN_STATES))
        with self._engine.begin() as connection:
            found = connection.execute(open_.order_by(BATCHES.created_at, BATCHES.id)).all()
            if not found:
                return Work()
            found = [self._moved_on(connection, batch) for batch in found]
            may_lease = now >= self._learned_at
            cards = tuple(self._card(batch, router_id, now, may_lease=may_lease) for batch in found)
            lines = [
                line
                for card in cards
                if may_lease and card.state is BatchState.IN_PROGRESS
                for line in self._lease(connection, card.id, wanted.get(card.id, 0), router_id, now)
            ]
        return Work(batches=cards, lines=tuple(lines))

    def check(self, batch_id: str, checked: Checked) -> None:
        """Begin a batch whose input was read, or refuse it; once."""
        with self._engine.begin() as connection:
            batch = connection.execute(select(tables.batches).where(BATCHES.id == batch_id)).one_or_none()
            if batch is None or batch.state != BatchState.VALIDATING:
                return
            if checked.errors:
                data = [asdict(each) for each in checked.errors]
                errors = {"object": "list", "data": data}
                enter(connection, batch, BatchState.FAILED, self._wall(), outcome=BatchState.FAILED, errors=errors)
                return
            if not enter(connection, batch, BatchState.IN_PROGRESS, self._wall(), outcome=BatchState.COMPLETED):
                return
            rows = [
                {"batch": batch_id, "number": number, "offset": offset, "length": length}
                for number, (offset, length) in enumerate(checked.spans, start=1)
            ]
            connection.execute(insert(tables.lines), rows)
            values = {"model": checked.model, "total": len(rows)}
            connection.execute(update(tables.batches).where(BATCHES.id == batch_id).values(**values))

    def kept(self, batch_id: str, after: int, most: int) -> list[Kept]:
        """Return the lines of a batch behind the one of that number, in their order."""
        wanted = select(tables.lines).where(LINES.batch == batch_id, LINES.number > after)
        with self._engine.connect() as connection:
            rows = connection.execute(wanted.order_by(LINES.number).limit(most)).all()
        return [
            Kept(
                line=Line(batch=row.batch, number=row.number, offset=row.offset, length=row.length),
                status=row.status,
                text=row.text,
            )
            for row in rows
        ]

    def end(self, batch_id: str, num_kept: int, files: Mapping[str, NewFile]) -> bool:
        """End a batch whose files are written; False, and nothing is done, where it ended already, or changed since.

        num_kept: results that are in them;  files: by `output_file_id` and `error_file_id`
        """
        with self._engine.begin() as connection:
            batch = connection.execute(select(tables.batches).where(BATCHES.id == batch_id)).one_or_none()
            with_result = select(func.count()).where(LINES.batch == batch_id, LINES.status.is_not(None))
            if batch is None or connection.execute(with_result).scalar() != num_kept:
                return False
            if batch.state not in (BatchState.FINALIZING, BatchState.CANCELLING):
                return False
            outcome, now, ids = BatchState(batch.outcome), self._wall(), {name: file.id for name, file in files.items()}
            if not enter(connection, batch, outcome, now, outcome=outcome, **ids):
                return False
            for file in files.values():
                kept = replace(file, seconds=batch.told["output_seconds"])
                insert_file(connection, batch.tenant, kept, now, days=self._files_days)
            failed = batch.total - batch.completed  # lines that were not computed, too
            connection.execute(update(tables.batches).where(BATCHES.id == batch_id).values(failed=failed))
            connection.execute(delete(tables.lines).where(LINES.batch == batch_id))
        return True

    def strays(self, names: Sequence[str]) -> list[str]:
        """Return which of these files are nobody's."""
        known: set[str] = set()
        with self._engine.connect() as connection:
            for at in range(0, len(names), CHUNK):
                wanted = select(FILES.id).where(FILES.id.in_(names[at : at + CHUNK]))
                known |= set(connection.execute(wanted).scalars())
        return [name for name in names if name not in known]

    def _keep(self, results: Sequence[Result], counted: Sequence[Counted], prices: Prices | None) -> None:
        """Keep results of lines that have none yet, with their rows, as one transaction."""
        one = tables.lines.update().where(
            LINES.batch == bindparam("of"), LINES.number == bindparam("at"), LINES.status.is_(None)
        )

        def first(connection: Connection) -> list[LedgerRow]:
            rows, sums = list[LedgerRow](), dict[str, Counter[str]]()
            for each in sorted(results, key=lambda each: (each.batch, each.number)):
                values = {"of": each.batch, "at": each.number, "status": each.status, "text": each.text}
                if not connection.execute(one, values).rowcount:
                    continue
                rows += each.rows
                found = sums.setdefault(each.batch, Counter())
                found["completed" if each.status == OK else "failed"] += 1
                for row in each.rows:
                    found.update({name: getattr(row, name) for name in tables.OF_BATCH[2:]})
            for batch, found in sums.items():
                added = {name: BATCHES[name] + amount for name, amount in found.items()}
                connection.execute(update(tables.batches).where(BATCHES.id == batch).values(added))
            return rows

        self._ledger.record((), counted, self._wall(), prices=prices, first=first)

    def _renewed(self, router_id: str, held: Collection[Key]) -> float:
        """Note what a router holds; return the time."""
        now = self._clock()
        if now > self._asked_at + LEARNS_S:  # nobody asked, or this process stood still: no lease was renewed meanwhile
            self._learned_at = now + LEARNS_S
            self._leases = {key: (router, now + LOST_S) for key, (router, _) in self._leases.items()}
        self._asked_at = now
        for key, (router, until) in list(self._leases.items()):
            if until < now or (router == router_id and key not in held):
                del self._leases[key]
        for key in held:
            if self._leases.setdefault(key, (router_id, now + LOST_S))[0] == router_id:
                self._leases[key] = router_id, now + LOST_S
        return now

    def _moved_on(self, connection: Connection, batch: Row[Any]) -> Row[Any]:
        """Return the batch in the state that time and its lines brought it to."""
        now, state = self._wall(), BatchState(batch.state)
        may_expire = state in (BatchState.VALIDATING, BatchState.IN_PROGRESS)
        if may_expire and now >= batch.expires_at:
            enter(connection, batch, BatchState.FINALIZING, now, outcome=BatchState.EXPIRED)
        elif state is BatchState.IN_PROGRESS and _num_left(batch) == 0:
            enter(connection, batch, BatchState.FINALIZING, now, outcome=BatchState.COMPLETED)
        else:
            return batch
        return connection.execute(select(tables.batches).where(BATCHES.id == batch.id)).one()

    def _card(self, batch: Row[Any], router_id: str, now: float, *, may_lease: bool) -> BatchCard:
        state, key = BatchState(batch.state), (batch.id, 0)
        is_at_work = any(each[0] == batch.id and each != key for each in self._leases)
        is_to_do = state is not BatchState.IN_PROGRESS and not is_at_work
        if is_to_do and may_lease:
            self._leases.setdefault(key, (router_id, now + LOST_S))
        return BatchCard(
            id=batch.id,
            tenant=batch.tenant,
            key_id=batch.key_id,
            state=state,
            outcome=BatchState(batch.outcome),
            endpoint=batch.endpoint,
            model=batch.model,
            input_file=batch.input_file_id,
            num_left=_num_left(batch),
            is_yours=is_to_do and self._leases.get(key, ("",))[0] == router_id,
        )

    def _lease(self, connection: Connection, batch_id: str, most: int, router_id: str, now: float) -> Iterable[Line]:
        if most <= 0:
            return
        leased = [number for of, number in self._leases if of == batch_id]
        wanted = select(LINES.number, LINES.offset, LINES.length).where(
            LINES.batch == batch_id, LINES.status.is_(None), LINES.number.not_in(leased)
        )
        for row in connection.execute(wanted.order_by(LINES.number).limit(most)):
            self._leases[batch_id, row.number] = router_id, now + LOST_S
            yield Line(batch=batch_id, number=row.number, offset=row.offset, length=row.length)

    def _expire(self) -> None:
        """Forget files whose time is over, but for those that open batches read, and batches that ended long ago."""
        read = select(BATCHES.input_file_id).where(BATCHES.state.in_(OPEN_STATES))
        before = self._wall() - self._files_days * DAY_S
        is_over = or_(FILES.expires_at < self._wall(), and_(FILES.expires_at.is_(None), FILES.created_at < before))
        expired = delete(tables.files).where(is_over, FILES.id.not_in(read))
        old = delete(tables.batches).where(BATCHES.state.not_in(OPEN_STATES), BATCHES.expires_at < before)
        with self._engine.begin() as connection:
            connection.execute(expired)
            connection.execute(old)


def _num_left(batch: Row[Any]) -> int:
    return int(batch.total - batch.completed - batch.failed)
