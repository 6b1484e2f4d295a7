"""Bounds the waits of one task, however many, with one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

Result = TypeVar("Result")


class Patience:
    """Use in the task that waits, as `with Patience() as patience: await patience.wait(…, seconds)`.

    `asyncio.timeout` sets a timer for each wait and cancels it again. A stream waits twice per token and hardly ever
    long, so that a timer which looks now and then, and is set anew only where nothing is overdue, costs a part of that.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "only tasks wait"
        self._task = task
        self._due_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_expired = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def wait(self, waiting: Awaitable[Result], seconds: float) -> Result:
        """What it gives. Raises TimeoutError, and cancels it, where that takes longer."""
        self._due_at = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._due_at:
            self._set_timer(self._due_at)
        num_cancelled = self._task.cancelling()
        try:
            return await waiting
        except asyncio.CancelledError:
            if self._has_expired and self._task.cancelling() == num_cancelled + 1:  # else somebody else cancelled, too
                raise TimeoutError from None
            raise
        finally:
            self._due_at = None
            if self._has_expired:
                self._has_expired = False
                self._task.uncancel()

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due_at is None:
            return  # whoever waits next sets it
        if self._due_at > self._loop.time():
            self._set_timer(self._due_at)
        else:
            self._has_expired = True
            self._task.cancel()
