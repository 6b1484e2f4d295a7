"""A limit for waiting on somebody else, in which time that this process stood still does not count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

TICK_S = 0.25


@asynccontextmanager
async def patience(seconds: float) -> AsyncGenerator[None, None]:
    """Raise TimeoutError as `asyncio.timeout` does, once so much time has passed while the event loop ran.

    Whoever stood still has not waited: what came meanwhile is still to be read.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def tick(left_s: float) -> None:
        nonlocal timer
        if left_s <= 0:
            limit.reschedule(loop.time())
        else:
            timer = loop.call_later(min(TICK_S, left_s), tick, left_s - TICK_S)

    async with asyncio.timeout(None) as limit:
        tick(seconds)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
