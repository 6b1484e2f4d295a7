"""What a router knows of tenants and keys, and what it asks of Accounts, which owns their store."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from serve_app.core.adapters import AdapterSet
from serve_app.core.errors import Unavailable
from serve_app.core.ledger import Counted, Prices, Row
from serve_app.core.tenants import Identity, Lease, Statement, Tenant
from serve_app.router.idempotency import Answer, Claim, Claimed, Message, Standing
from serve_app.router.patience import begin
from serve_app.tenants.keys import KEY, KeyCache
from serve_app.tenants.published import Change

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
SPACING_S = 0.05
"""Between looks for keys that nobody knows, however many are presented."""
TIMEOUT_S = 2.0
ADMINISTRATION_TIMEOUT_S = 20.0


Call = Callable[..., Awaitable[Any]]
"""Calls a method of Accounts: its name, arguments, `timeout_s`. Raises the ServeError that it answers, and Unavailable
where it does not answer.
"""


class AccountsClient:
    """Asks Accounts again and again for what changed; where they do not answer, goes on with what it has.

    call:    carries each call
    held:    what was heard last
    prices:  of what no row explains, which the ledger writes down by itself; may be exchanged
    kept:    answers that this router has under an Idempotency-Key, of which Accounts that were away are told again;
             of each, for how many seconds it is good
    on_look: called behind every look, with whether the key of an id is still good
    """

    def __init__(
        self,
        call: Call,
        router_id: str,
        *,
        grace_s: float,
        kept: Callable[[], Iterable[tuple[Answer, float]]] = tuple,
        on_look: Callable[[Callable[[str], bool]], None] = lambda is_good: None,
    ) -> None:
        self._call = call
        self._router_id = router_id
        self._kept = kept
        self._on_look = on_look
        self.held = KeyCache(grace_s=grace_s)
        self._answering: dict[str, Claim] = {}  # by attempt
        self._given: set[str] = set()  # of those, what is known to be this router's to answer
        self.prices: Prices | None = None
        self._is_reached = True
        self._telling: asyncio.Task[None] | None = None
        self._looked_at = -math.inf
        self._turn = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None

    def identify(self, presented: str | None) -> Identity:
        """Return whose key it is. Raises Unauthenticated; Unavailable where nothing was heard for too long."""
        return self.held.identify(presented, now=time.time(), at=time.monotonic())

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of that name, as heard of last; None where there is none."""
        return self.held.directory.tenants.get(name)

    def origins(self) -> frozenset[str]:
        return self.held.directory.origins

    @property
    def published(self) -> AdapterSet | None:
        """Published adapters, as heard of last; None where nothing was."""
        return self.held.directory.published

    async def change_adapters(self, change: Change) -> AdapterSet:
        """Change what is published; what this router knows is then as new. Raises ServeError."""
        after: AdapterSet = await self._call("change_adapters", change, timeout_s=ADMINISTRATION_TIMEOUT_S)
        await self.look()
        return after

    async def administer(self, service: str, arguments: Mapping[str, object], actor: str) -> Mapping[str, object]:
        """Have something administered; what this router knows is then as new as the answer. Raises ServeError."""
        found: Mapping[str, object] = await self._call(
            "administer", service, dict(arguments), actor, timeout_s=ADMINISTRATION_TIMEOUT_S
        )
        await self.look()
        return found

    async def batches(self, method: str, *arguments: object) -> Any:
        """Call a method of `BatchWork` or `BatchStore`. Raises ServeError."""
        return await self._call("batches", method, *arguments, timeout_s=ADMINISTRATION_TIMEOUT_S)

    async def renew(self, router_id: str, statements: Sequence[Statement]) -> Sequence[Lease]:
        """Raises Unavailable."""
        leases: Sequence[Lease] = await self._call("renew", router_id, statements, timeout_s=TIMEOUT_S)
        return leases

    async def record(self, rows: Sequence[Row], counted: Sequence[Counted]) -> None:
        """Raises Unavailable; nobody knows then what was kept."""
        await self._call("record", rows, counted, self.prices, timeout_s=ADMINISTRATION_TIMEOUT_S)

    async def claim(self, claim: Claim) -> Claimed:
        """Raises KeyReused, Unavailable."""
        self._answering[claim.attempt] = claim
        claimed: Claimed = await self._call("claim", claim, self._router_id, timeout_s=TIMEOUT_S)
        if claimed is Standing.YOURS:
            self._given.add(claim.attempt)
        return claimed

    async def deliver(self, claim: Claim, answer: Sequence[Message] | None) -> None:
        """Raises Unavailable."""
        if answer is None:  # a book that knows nothing of it need not learn of it
            self._given.discard(claim.attempt)
        await self._call("deliver", claim, self._router_id, answer, timeout_s=ADMINISTRATION_TIMEOUT_S)

    def leave(self, claim: Claim) -> None:
        self._answering.pop(claim.attempt, None)
        self._given.discard(claim.attempt)

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Hear what changed, and tell what became of keys; where nobody answers, what was heard stays."""
        await self._look()
        self._on_look(partial(self.held.directory.is_good, now=time.time()))

    async def _look(self) -> None:
        asked_at = time.monotonic()
        attempts = [(each, each.attempt in self._given) for each in self._answering.values()]
        try:
            found = await self._call(
                "directory", self.held.directory.version, self._router_id, attempts, timeout_s=TIMEOUT_S
            )
        except Exception as error:  # whatever it is, this loop is how it ends
            if self._is_reached:
                logger.warning("accounts cannot be reached, what is known goes on being good: %s", error)
            self._is_reached = False
            return
        self.held.hear(found, asked_at)
        if not self._is_reached:  # it may be others, who know no answers
            self._telling = begin(self._tell_again())
        self._is_reached = True

    async def _tell_again(self) -> None:
        """Deliver what is kept here; where they are away again, they are told when they are back."""
        for answer, seconds in tuple(self._kept()):
            try:
                await self.deliver(replace(answer.claim, attempt=uuid4().hex, seconds=seconds), answer.messages)
            except Unavailable:
                return

    async def look_again(self, presented: str) -> None:
        """Look before this key is refused: it may have been made a moment ago, through another router.

        Whoever comes before a look begins shares it.
        """
        if not self._is_reached or KEY.fullmatch(presented) is None:
            return
        if self._again is None:
            self._again = begin(self._look_in_turn())
        await asyncio.shield(self._again)

    async def _look_in_turn(self) -> None:
        async with self._turn:
            await asyncio.sleep(max(0.0, self._looked_at + SPACING_S - time.monotonic()))
            self._looked_at = time.monotonic()
            self._again = None  # who comes from here on may ask for what is newer
            await self.look()
