"""The way of a router to the deployment that owns the store of tenants."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context
from functools import partial
from typing import Any
from uuid import uuid4

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.core.errors import ServeError, Unavailable
from serve_app.core.ledger import Counted, Prices, Row, UsageLine, UsageQuestion
from serve_app.core.tenants import Identity, Lease, Statement
from serve_app.deployments.transport import by_value
from serve_app.router.claims import Claim, Claimed, Standing
from serve_app.router.replays import KeptAnswer, Message
from serve_app.tenants.held import HeldDirectory
from serve_app.tenants.keys import KEY

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
SPACING_S = 0.05
"""Between looks for keys that nobody knows, however many are presented."""
TIMEOUT_S = 2.0
ADMINISTRATION_TIMEOUT_S = 20.0


class AccountsLink:
    """A router's way to Accounts: it asks again and again for what changed, and goes on with what it has.

    accounts: handle of the deployment
    kept:     answers that this router has under an Idempotency-Key, of which Accounts that were away are told again
    on_look:  called behind every look, with whether the key of an id is still good
    """

    def __init__(
        self,
        accounts: DeploymentHandle[Any],
        router_id: str,
        *,
        grace_s: float,
        kept: Callable[[], Iterable[KeptAnswer]] = tuple,
        on_look: Callable[[Callable[[str], bool]], None] = lambda is_good: None,
    ) -> None:
        self._on_look = on_look
        self._accounts = by_value(accounts)
        self._router_id = router_id
        self._held = HeldDirectory(grace_s=grace_s)
        self._answering: dict[str, Claim] = {}  # by attempt
        self._given: set[str] = set()  # of those, what is known to be this router's to answer
        self._prices: Prices | None = None
        self._kept = kept
        self._is_reached = True
        self._telling: asyncio.Task[None] | None = None
        self._looked_at = -math.inf
        self._turn = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None

    def last_for(self, grace_s: float) -> None:
        """Go by what was heard for so long."""
        self._held.grace_s = grace_s

    def identify(self, presented: str | None) -> Identity:
        """Raises Unauthenticated; Unavailable where nothing was heard for too long."""
        return self._held.identify(presented, now=time.time(), at=time.monotonic())

    def origins(self) -> frozenset[str]:
        return self._held.origins

    async def administer(self, service: str, arguments: Mapping[str, object], actor: str) -> Mapping[str, object]:
        """Raises ServeError. What this router holds is as new as the answer."""
        ask = partial(self._accounts.administer.remote, service, dict(arguments), actor)
        answer = await self._ask(ask, timeout_s=ADMINISTRATION_TIMEOUT_S)
        if isinstance(answer, ServeError):
            raise answer
        await self.look()
        found: Mapping[str, object] = answer
        return found

    async def renew(self, router_id: str, statements: Sequence[Statement]) -> Sequence[Lease]:
        """Raises Unavailable."""
        leases: Sequence[Lease] = await self._ask(
            partial(self._accounts.renew.remote, router_id, statements), timeout_s=TIMEOUT_S
        )
        return leases

    async def record(self, rows: Sequence[Row], counted: Sequence[Counted]) -> None:
        """Raises Unavailable; what was kept by then, nobody knows."""
        ask = partial(self._accounts.record.remote, rows, counted, self._prices)
        await self._ask(ask, timeout_s=ADMINISTRATION_TIMEOUT_S)

    def charge_by(self, prices: Prices) -> None:
        self._prices = prices

    async def usage(self, question: UsageQuestion) -> Sequence[UsageLine]:
        """Raises Unavailable."""
        lines: Sequence[UsageLine] = await self._ask(
            partial(self._accounts.usage.remote, question), timeout_s=ADMINISTRATION_TIMEOUT_S
        )
        return lines

    async def claim(self, claim: Claim) -> Claimed:
        """Raises KeyReused, Unavailable."""
        self._answering[claim.attempt] = claim
        found = await self._ask(partial(self._accounts.claim.remote, claim, self._router_id), timeout_s=TIMEOUT_S)
        if isinstance(found, ServeError):
            raise found
        claimed: Claimed = found
        if claimed is Standing.YOURS:
            self._given.add(claim.attempt)
        return claimed

    async def deliver(self, claim: Claim, answer: Sequence[Message] | None) -> None:
        """Raises Unavailable."""
        if answer is None:  # a book that knows nothing of it need not learn of it
            self._given.discard(claim.attempt)
        ask = partial(self._accounts.deliver.remote, claim, self._router_id, answer)
        await self._ask(ask, timeout_s=ADMINISTRATION_TIMEOUT_S)

    def leave(self, claim: Claim) -> None:
        self._answering.pop(claim.attempt, None)
        self._given.discard(claim.attempt)

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Hear what changed, and tell what became of keys; where nobody answers, what is held stays."""
        await self._look()
        self._on_look(partial(self._held.is_good, now=time.time()))

    async def _look(self) -> None:
        asked_at = time.monotonic()
        attempts = [(each, each.attempt in self._given) for each in self._answering.values()]
        ask = partial(self._accounts.directory.remote, self._held.version, self._router_id, attempts)
        try:
            found = await self._ask(ask, timeout_s=TIMEOUT_S)
        except Exception as error:  # whatever it is, this loop is how it ends
            if self._is_reached:
                logger.warning("accounts cannot be reached, what is known goes on being good: %s", error)
            self._is_reached = False
            return
        self._held.hear(found, asked_at)
        if not self._is_reached:  # it may be others, who know no answers
            self._telling = asyncio.get_running_loop().create_task(self._tell_again(), context=Context())
        self._is_reached = True

    async def _tell_again(self) -> None:
        """Deliver what is kept here; where they are away again, they are told when they are back."""
        for each in tuple(self._kept()):
            claim = Claim(
                tenant=each.tenant,
                key=each.key,
                fingerprint=each.fingerprint,
                attempt=uuid4().hex,
                seconds=each.seconds,
            )
            try:
                await self.deliver(claim, each.messages)
            except Unavailable:
                return

    async def look_again(self, presented: str) -> None:
        """Look before this key is refused: it may have been made a moment ago, through another router.

        Whoever comes before a look begins shares it.
        """
        if not self._is_reached or KEY.fullmatch(presented) is None:
            return
        if self._again is None:
            self._again = asyncio.get_running_loop().create_task(self._look_in_turn(), context=Context())
        await asyncio.shield(self._again)

    async def _look_in_turn(self) -> None:
        async with self._turn:
            await asyncio.sleep(max(0.0, self._looked_at + SPACING_S - time.monotonic()))
            self._looked_at = time.monotonic()
            self._again = None  # who comes from here on may ask for what is newer
            await self.look()

    async def _ask(self, ask: Any, *, timeout_s: float) -> Any:
        """In an empty context, as Serve would cancel the call with the client's request. Raises Unavailable."""
        response = Context().run(ask)
        try:
            async with asyncio.timeout(timeout_s):
                return await response
        except (TimeoutError, RayError, RayServeException) as error:
            response.cancel()
            facts = {"retry_after_s": 2}
            raise Unavailable(f"Accounts do not answer ({type(error).__name__}); retry.", None, facts) from error
