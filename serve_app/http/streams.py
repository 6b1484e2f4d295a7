"""Sends the chunks of a stream as they come, and a sign of life while none do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

from serve_app.api.sse import comment
from serve_app.core.errors import DeadlineExceeded, ServeError
from serve_app.http.exchange import Exchange
from serve_app.router.inbox import Event
from serve_app.router.run import Run
from serve_app.router.story import Story

KEEP_ALIVE = comment("keep-alive")


class Renderer(Protocol):
    """Writes the events of a run as bytes of a stream."""

    def chunks(self, event: Event) -> bytes:
        """Return what this event allows to be sent, if anything."""
        ...

    def tail(self) -> bytes:
        """Return what ends the stream."""
        ...


async def stream(
    run: Run, renderer: Renderer, exchange: Exchange, *, story: Story, keep_alive_s: float, max_stall_s: float
) -> None:
    """Send a run that was entered, so that every replica has accepted its part.

    Events that wait already go out together. Where nothing was sent for `keep_alive_s`, a comment is; the first one
    brings status 200 with it, and a later failure is an event. An earlier failure still decides the status. Where the
    server before us takes nothing for `max_stall_s`, as the client reads nothing, the stream fails.

    Raises ServeError, ClientGone.
    """
    pending = b""
    with Patience() as patience:
        next_event = partial(_next_event, run, exchange, patience, keep_alive_s=keep_alive_s, max_stall_s=max_stall_s)
        try:
            while event := await next_event():
                if event.delta.recording is None:
                    pending += renderer.chunks(event)
                else:  # many numbers to write
                    pending += await asyncio.to_thread(renderer.chunks, event)
                if pending and not run.has_ready:
                    story.first_sent_at = story.first_sent_at or time.monotonic()
                    sending, pending = pending, b""  # once, however that ends
                    await _in_time(patience, exchange.stream(sending), max_stall_s)
        except ServeError:
            if pending and exchange.has_started:
                await _in_time(patience, exchange.stream(pending), max_stall_s)
            raise
        await _in_time(patience, exchange.end_stream(pending + renderer.tail()), max_stall_s)


async def in_time(sending: Awaitable[None], max_stall_s: float) -> None:
    """Await what sends. Raises DeadlineExceeded if that takes longer."""
    with Patience() as patience:
        await _in_time(patience, sending, max_stall_s)


async def _in_time(patience: Patience, sending: Awaitable[None], max_stall_s: float) -> None:
    try:
        await patience.wait(sending, max_stall_s)
    except TimeoutError:
        raise DeadlineExceeded(
            f"Nothing of the response was read for {max_stall_s:g} s.", None, {"max_stall_s": max_stall_s}
        ) from None


async def _next_event(
    run: Run, exchange: Exchange, patience: Patience, *, keep_alive_s: float, max_stall_s: float
) -> Event | None:
    """Return the next event, None at the end. Comments go out while it is awaited."""
    while True:
        try:
            if run.has_ready:
                return await run.next_event()
            return await patience.wait(run.next_event(), keep_alive_s)
        except TimeoutError:
            await _in_time(patience, exchange.stream(KEEP_ALIVE), max_stall_s)


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
        """Return what it gives. If that takes longer, cancel it and raise TimeoutError."""
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
