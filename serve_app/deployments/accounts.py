"""The deployment that owns the store of tenants."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from serve_app.core.batches import FILES_DAYS
from serve_app.core.errors import InvalidRequest, NotFound, ServeError, Unavailable
from serve_app.core.ledger import Counted, Prices, Row
from serve_app.core.tenants import Lease, Limits, Statement
from serve_app.deployments.logs import log_as_configured
from serve_app.router.idempotency import Attempts, Claim, Claimed, Claims, Message
from serve_app.router.patience import begin
from serve_app.tenants.admin_service import AdminService
from serve_app.tenants.errors import NotThere, StoreUnavailable, TenancyError
from serve_app.tenants.keys import VARIABLE, Directory
from serve_app.tenants.leased_limits import NEVER_TOLD
from serve_app.tenants.ledger import prune
from serve_app.tenants.lending import Lending, Period
from serve_app.tenants.opening import open_store
from serve_app.tenants.published import Change
from serve_app.tenants.published_table import change_published, published_in
from serve_app.tenants.store import Author

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LEARNS_S = 3.0
"""In which a router has asked a replica that began after another, and told it what it answers."""
PRUNING_PERIOD_S = 3600.0
READING_S = 0.5
"""Less than a router waits for its leases."""
MAX_READING = 2
"""Budgets at once, so that a slow database leaves threads to those who look for tenants."""


class Accounts:
    """The one replica that writes on behalf of the service. What the command line writes beside it, it sees.

    store, pepper, ledger_days, files_days: see RouterArgs
    """

    def __init__(self, store: str, pepper: str, ledger_days: int, files_days: int = FILES_DAYS) -> None:
        log_as_configured()
        secret = Path(pepper)
        self._store, self._pepper = open_store(
            store,
            pepper_file=secret,
            environment=os.environ.get(VARIABLE),
            begins=not secret.exists(),  # a pepper without its store: that was moved, and another would know no key
        )
        self._admin_service = AdminService(self._store, self._pepper, files_days=files_days)
        self._directory = self._read_directory()
        self._lending = Lending(
            self._limits_of, clock=time.monotonic, wall=time.time, spent_of=self._admin_service.ledger.cost_of
        )
        self._claims = Claims(clock=time.monotonic, learns_s=LEARNS_S)
        self._ledger_days, self._pruned_at = ledger_days, -math.inf
        self._writing = asyncio.Lock()
        self._reading: dict[tuple[str, Period], asyncio.Task[None]] = {}
        self._few_reading = asyncio.Semaphore(MAX_READING)

    async def directory(self, known_version: int, router_id: str, attempts: Attempts = ()) -> Directory | None:
        """All tenants and keys; None where that version is what there is. attempts: that the router still answers"""
        self._claims.heard(router_id, attempts)
        return await asyncio.to_thread(self._newer, known_version)

    async def administer(self, service: str, arguments: Mapping[str, object], actor: str) -> object:
        """Return what the admin service answers, or the refusal that the client is to be told."""
        by = Author(name=actor, at=time.time())
        return await _answered(f"{service} of {actor}", self._admin_service.answer, service, arguments, by)

    async def batches(self, method: str, *arguments: object) -> object:
        """As AdminService.of_batches, a refusal returned; one call after the other."""
        return await self._in_turn(_answered(method, self._admin_service.of_batches, method, *arguments))

    async def change_adapters(self, change: Change) -> object:
        """Return what is published after the change, or the refusal that the client is to be told."""
        return await _answered(f"{change.action} {change.address}", change_published, self._store, change)

    async def renew(self, router_id: str, statements: Sequence[Statement]) -> Sequence[Lease]:
        """Leases of tenants' limits, as they are now; on the event loop alone, so that there is one writer. What the
        ledger has to say first is read beside it; whose budgets are not read in time is told nothing.
        """
        await self._read_budgets({statement.tenant for statement in statements})
        return [
            NEVER_TOLD if self._lending.unread(statement.tenant) else self._lending.renew(router_id, statement)
            for statement in statements
        ]

    async def record(self, rows: Sequence[Row], counted: Sequence[Counted], prices: Prices | None = None) -> None:
        """As LedgerStore.record, one batch after the other."""
        await self._in_turn(self._record(rows, counted, prices))

    async def claim(self, claim: Claim, router_id: str) -> Claimed | ServeError:
        """As Claims.claim, a refusal returned; on the event loop alone, so that there is one writer."""
        try:
            return self._claims.claim(claim, router_id)
        except ServeError as refusal:
            return refusal

    async def deliver(self, claim: Claim, router_id: str, answer: Sequence[Message] | None) -> None:
        self._claims.deliver(claim, router_id, answer)

    async def check_health(self) -> None:
        """Called by Serve; a store that cannot be read is opened anew by another replica.

        One that was moved away is not: it is missed until it is back, or until a person starts the service again.
        """
        try:
            await asyncio.to_thread(lambda: self._store.version)
        except StoreUnavailable as error:
            logger.warning("%s", error)

    async def _record(self, rows: Sequence[Row], counted: Sequence[Counted], prices: Prices | None) -> None:
        await asyncio.to_thread(self._admin_service.ledger.record, rows, counted, time.time(), prices=prices)
        if time.monotonic() - self._pruned_at > PRUNING_PERIOD_S:
            self._pruned_at = time.monotonic()
            await asyncio.to_thread(prune, self._store.engine, now=time.time(), days=self._ledger_days)

    async def _in_turn(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Write one after the other, each to its end: a router that gives up its call ends no thread that writes."""

        async def alone() -> Result:
            async with self._writing:
                return await work

        return await asyncio.shield(begin(alone()))

    async def _read_budgets(self, tenants: Collection[str]) -> None:
        """Wait for what the ledger says of these tenants' budgets, but not for long; each is read once at a time."""
        for tenant in tenants:
            for period in self._lending.unread(tenant):
                if (tenant, period) not in self._reading:
                    self._reading[tenant, period] = begin(self._read_budget(tenant, period))
        wanted = [task for (tenant, _), task in self._reading.items() if tenant in tenants]
        if wanted:
            await asyncio.wait(wanted, timeout=READING_S)

    async def _read_budget(self, tenant: str, period: Period) -> None:
        try:
            async with self._few_reading:
                spent = await asyncio.to_thread(self._admin_service.ledger.cost_of, tenant, period[1])
            self._lending.tell(tenant, period, spent)
        except Exception:
            logger.warning("the ledger does not say what tenant %s spent in %s", tenant, period[1], exc_info=True)
        finally:
            del self._reading[tenant, period]

    def _newer(self, known_version: int) -> Directory | None:
        version = self._store.version
        if self._directory.version != version:
            self._directory = self._read_directory()
        return None if version == known_version else self._directory

    def _read_directory(self) -> Directory:
        directory = self._store.directory(self._pepper)  # first: what changes meanwhile is looked at again
        return directory.with_published(published_in(self._store))

    def _limits_of(self, tenant: str) -> Limits:
        """As of the last look of any router, which is half a second ago at most; of one that is gone none."""
        known = self._directory.tenants.get(tenant)
        return Limits() if known is None else known.limits


async def _answered(what: str, ask: Callable[..., object], *arguments: object) -> object:
    """Return what a blocking call returns, or the refusal that the client is to be told."""
    try:
        return await asyncio.to_thread(ask, *arguments)
    except ServeError as refusal:
        return refusal
    except StoreUnavailable as error:
        logger.warning("%s was not done: %s", what, error)
        return Unavailable(error.shown, None, {"retry_after_s": 2})
    except NotThere as error:
        return NotFound(str(error))
    except TenancyError as error:
        return InvalidRequest(str(error))
