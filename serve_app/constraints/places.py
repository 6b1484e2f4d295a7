"""Places for what may take long: quick ones, in which everything begins, and slow ones, for what takes longer.

However many constraints take long, those that do not find a place within moments.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from typing import TypeVar

from serve_app.constraints.limits import ConstraintLimits
from serve_app.constraints.trials import OutOfTime
from serve_app.core.errors import Overloaded

Result = TypeVar("Result")
COME_AGAIN_S = 2


class Places:
    """Lives on one event loop. num_quick, num_slow: that run"""

    def __init__(self, limits: ConstraintLimits) -> None:
        self._limits = limits
        self._free = asyncio.Semaphore(limits.max_trials)
        self.num_slow = 0

    async def run(self, executor: Executor, work: Callable[[float], Result]) -> Result:
        """Run it in a thread, given the seconds that it may take.

        Raises Overloaded where no place is free in time, and where the clock ended it.
        """
        async with self._place() as release:
            has_room = self.num_slow < self._limits.max_slow
            seconds = self._limits.max_wall_s if has_room else self._limits.quick_s  # the kernel keeps to it
            running = asyncio.get_running_loop().run_in_executor(executor, copy_context().run, work, seconds)
            try:
                with suppress(TimeoutError):
                    return await asyncio.wait_for(asyncio.shield(running), self._limits.quick_s)
                release()
                return await self._slow(running)
            except OutOfTime:  # it had not used up its processor time, so others had the processors
                raise _overloaded("The machine was too busy to compile this constraint in time.") from None

    async def _slow(self, running: asyncio.Future[Result]) -> Result:
        self.num_slow += 1
        try:
            return await running
        finally:
            self.num_slow -= 1

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[Callable[[], None]]:
        """A quick place, and what gives it back before the end."""
        try:
            await asyncio.wait_for(self._free.acquire(), self._limits.max_wait_s)
        except TimeoutError:
            raise _overloaded("Too many constraints are being compiled.") from None
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._free.release()

        try:
            yield release
        finally:
            release()


def _overloaded(message: str) -> Overloaded:
    return Overloaded(message, None, {"retry_after_s": COME_AGAIN_S})
