"""The deployment that owns the store of tenants, and the way of a router to it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.core.errors import InvalidRequest, NotFound, ServeError, Unavailable
from serve_app.core.tenants import Identity
from serve_app.deployments.logs import log_as_configured
from serve_app.deployments.transport import by_value
from serve_app.tenants.directory import Directory
from serve_app.tenants.errors import NotThere, TenancyError
from serve_app.tenants.held import HeldDirectory
from serve_app.tenants.office import Office
from serve_app.tenants.opening import open_store
from serve_app.tenants.pepper import VARIABLE
from serve_app.tenants.store import Author

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
TIMEOUT_S = 2.0
ADMINISTRATION_TIMEOUT_S = 20.0


class Accounts:
    """The one replica that writes on behalf of the service. What the command line writes beside it, it sees.

    store, pepper: see RouterArgs
    """

    def __init__(self, store: str, pepper: str) -> None:
        log_as_configured()
        self._store, self._pepper = open_store(store, pepper_file=Path(pepper), environment=os.environ.get(VARIABLE))
        self._office = Office(self._store, self._pepper)

    async def directory(self, known_version: int) -> Directory | None:
        """All tenants and keys; None where that version is what there is."""
        return await asyncio.to_thread(self._newer, known_version)

    async def administer(self, service: str, arguments: Mapping[str, object], actor: str) -> object:
        """What the office answers, or the refusal that the client is to be told."""
        by = Author(name=actor, at=time.time())
        try:
            return await asyncio.to_thread(self._office.answer, service, arguments, by)
        except NotThere as error:
            return NotFound(str(error))
        except TenancyError as error:
            return InvalidRequest(str(error))

    async def check_health(self) -> None:
        """Called by Serve; a store that cannot be read is opened anew by another replica."""
        await asyncio.to_thread(lambda: self._store.version)

    def _newer(self, known_version: int) -> Directory | None:
        return None if self._store.version == known_version else self._store.directory(self._pepper)


class AccountsLink:
    """A router's way to Accounts: it asks again and again for what changed, and goes on with what it has.

    accounts: handle of the deployment
    """

    def __init__(self, accounts: DeploymentHandle[Any], *, grace_s: float) -> None:
        self._accounts = by_value(accounts)
        self._held = HeldDirectory(grace_s=grace_s)
        self._is_reached = True

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

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Hear what changed; where nobody answers, what is held stays."""
        asked_at = time.monotonic()
        try:
            found = await self._ask(partial(self._accounts.directory.remote, self._held.version), timeout_s=TIMEOUT_S)
        except Exception as error:  # whatever it is, this loop is how it ends
            if self._is_reached:
                logger.warning("accounts cannot be reached, what is known goes on being good: %s", error)
            self._is_reached = False
            return
        self._held.hear(found, asked_at)
        self._is_reached = True

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
