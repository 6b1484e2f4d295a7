"""An event loop in a thread of its own, so that plain calls work where a loop runs already, as in Jupyter."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of an iteration, and what it failed with."""

    error: BaseException | None = None


class Background:
    """Runs coroutines for threads and for other loops; what they are given up for is cancelled."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="serve_app.lab", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for it in this thread; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def awaitable(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Wait for it in the loop that runs here."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """What it yields, in this thread; closing the iteration, or an interrupt, closes the source."""
        arrived: queue.SimpleQueue[T | Ended] = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(_pour(source, arrived), self._loop)
        try:
            while not isinstance(item := arrived.get(), Ended):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread; what still runs is left where it is."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()


async def _pour(source: AsyncIterator[T], into: queue.SimpleQueue[T | Ended]) -> None:
    error: BaseException | None = None
    try:
        async for item in source:
            into.put(item)
    except Exception as failure:
        error = failure
    finally:
        into.put(Ended(error=error))
