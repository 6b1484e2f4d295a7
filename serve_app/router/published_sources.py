"""Where a router keeps the set of published adapters, and hears of what others changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from serve_app.core.adapters import AdapterSet
from serve_app.core.errors import Unavailable
from serve_app.router.accounts import AccountsClient
from serve_app.tenants.errors import StoreUnavailable
from serve_app.tenants.published import Change, PublishedFile, changed

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
"""Between looks for what another router has published."""


class FileSource:
    """A file that all routers of one machine share.

    published: the set as heard of last; None before it was heard of
    on_look:   called after every look
    """

    def __init__(self, file: PublishedFile, *, on_look: Callable[[], None] = lambda: None) -> None:
        self.published: AdapterSet | None = None
        self._file = file
        self._on_look = on_look
        self._mark: tuple[int, ...] | None = None
        self._complaint = ""
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Hear what the set is now. Where nobody answers, what was heard stays."""
        try:
            async with self._turn:
                await asyncio.to_thread(self._read)
            self._complaint = ""
        except (OSError, StoreUnavailable) as error:
            if str(error) != self._complaint:
                logger.error("%s", error)
            self._complaint = str(error)
        self._on_look()

    async def change_adapters(self, change: Change) -> AdapterSet:
        """Carry out a change, and return the set after it. Raises ServeError; then nothing was changed."""
        try:
            after = await asyncio.to_thread(self._file.change, change)
        except StoreUnavailable as error:
            logger.error("%s", error)
            raise Unavailable(error.shown, None, {"retry_after_s": 2}) from error
        await self.look()
        return after

    def _read(self) -> None:
        mark = self._file.mark  # first: what is written meanwhile is read again
        if mark != self._mark:
            self.published, self._mark = self._file.read(), mark


class MemorySource:
    """A set that ends with the process, for a router that is alone."""

    def __init__(self) -> None:
        self.published = AdapterSet()

    async def look(self) -> None:
        """There is nobody to hear of."""

    async def change_adapters(self, change: Change) -> AdapterSet:
        self.published = changed(self.published, change)
        return self.published


Source = AccountsClient | FileSource | MemorySource
"""Where the set of published adapters is kept."""
