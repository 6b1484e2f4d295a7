"""Brings rows to the ledger in batches, beside the requests, until each has arrived."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from serve_app.core.ledger import Counted, Row, Spent
from serve_app.router.accounts import AccountsClient

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
MAX_BATCH = 256
MAX_ROWS = 100_000
"""That wait for a ledger which cannot be reached. Of those beyond, tokens stay known: as unattributed."""


class LedgerWriter:
    """A row is sent again, as it was, until the ledger says that it has it; the ledger takes it once.

    With the rows goes what replicas counted, read after them, so that no row tells of more than was counted.
    """

    def __init__(self, ledger: AccountsClient, counts: Counts) -> None:
        self._ledger = ledger
        self._counts = counts
        self._rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self._is_flushing = asyncio.Lock()

    @property
    def num_waiting(self) -> int:
        return len(self._rows)

    def write(self, rows: Sequence[Row]) -> None:
        """Have them brought soon; never waits."""
        self._rows.extend(rows)

    async def run(self) -> None:
        """Bring for ever what there is."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except Exception:
                logger.warning("the ledger cannot be reached; %d rows wait for it", len(self._rows), exc_info=True)

    async def flush(self) -> None:
        """Bring everything. Raises what the ledger raises; what has not arrived is kept."""
        async with self._is_flushing:
            is_first = True
            while self._rows or is_first:
                is_first = False
                await self._flush_one()

    async def _flush_one(self) -> None:
        batch = list(islice(self._rows, MAX_BATCH))
        counted = self._counts.take()
        if not batch and not counted:
            return
        try:
            await self._ledger.record(batch, counted)
        except BaseException:
            self._counts.give_back(counted)
            raise
        arrived = {row.id for row in batch}
        while self._rows and self._rows[0].id in arrived:  # the oldest may have been dropped meanwhile
            self._rows.popleft()


class Counts:
    """Grows with the flows that something was computed for since it was taken, not with those that there ever were."""

    def __init__(self) -> None:
        self._untold: dict[tuple[str, str], Counted] = {}

    def note(self, replica_id: str, model: str, spent: Iterable[Spent]) -> None:
        """In any order: one that was passed on its way changes nothing."""
        for each in spent:
            self._keep(Counted(replica_id=replica_id, model=model, spent=each))

    def take(self) -> list[Counted]:
        """All of it; whoever could not tell the ledger gives it back."""
        untold, self._untold = self._untold, {}
        return list(untold.values())

    def give_back(self, counted: Iterable[Counted]) -> None:
        for each in counted:
            self._keep(each)

    def _keep(self, counted: Counted) -> None:
        key = counted.replica_id, counted.spent.flow
        before = self._untold.get(key)
        if before is not None and before.spent.engine_ns >= counted.spent.engine_ns:
            later = counted.spent.at_least(before.spent)
            counted = Counted(replica_id=counted.replica_id, model=counted.model, spent=later)
        self._untold[key] = counted
