"""Begins work that outlives whoever asked for it, and limits the wait for somebody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any, TypeVar

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


Result = TypeVar("Result")


def begin(work: Coroutine[Any, Any, Result], tasks: set[Any] | None = None) -> asyncio.Task[Result]:
    """Begin in an empty context: Serve cancels the calls of a client's request.

    tasks: keep the task until it has ended; None leaves that to the caller
    """
    task = asyncio.get_running_loop().create_task(work, context=Context())
    if tasks is not None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task
