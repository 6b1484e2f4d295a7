"""Threads that prepare requests, so that a short prompt never waits for a long one, nor a flow for another's many."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

from serve_app.core.backend import LONG_TEXT, text_size
from serve_app.core.errors import Overloaded
from serve_app.core.machine import take_leftovers
from serve_app.core.request import GenerationRequest
from serve_app.core.shares import Share
from serve_app.replica.text_turns import TextTurns, Work

Result = TypeVar("Result")

LANES = ((LONG_TEXT, 2), (524_288, 1), (None, 1))
"""Characters and ids of all prompts together, at most, and threads. Long work is bounded to a thread, whoever sends it,
and takes what steps leave of a core."""
HEADROOM = 4
"""Room that is asked for, of long texts: so many times what they take, so that some is left for shorter ones."""
RETRY_S = 5


class Lane:
    """One pool of threads. Each thread that is free does the work whose turn it is then."""

    def __init__(self, name: str, num_threads: int, *, is_long: bool) -> None:
        begin = take_leftovers if is_long else None
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=begin)
        self._turns = TextTurns()
        self._lock = Lock()

    async def run(self, work: Work) -> Any:
        """Do it when its turn has come; or not at all, where nobody waits for it until then."""
        with self._lock:
            self._turns.add(work)
        try:
            self._pool.submit(self._take_turn)
            return await asyncio.wrap_future(work.future)
        finally:
            with self._lock:
                self._turns.discard(work)

    def close(self) -> None:
        """Wait for what runs; what has not begun is dropped."""
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            dropped = self._turns.take_all()
        for work in dropped:
            work.future.cancel()

    def _take_turn(self) -> None:
        with self._lock:
            work = self._turns.take()
        if work is not None:
            work.run()


class TokenizerLanes:
    """A lane per magnitude of work. Lives on one event loop.

    max_waiting_chars: of long texts that were not cut into tokens yet; None is no bound
    """

    def __init__(self, max_waiting_chars: int | None = None) -> None:
        self._max_waiting_chars = max_waiting_chars
        self._num_waiting: Counter[str] = Counter()
        self._lanes = [
            (most, Lane(f"tokenizer-{number}", num_threads, is_long=number > 0))
            for number, (most, num_threads) in enumerate(LANES)
        ]

    async def run(self, requests: Items[GenerationRequest], work: Callable[[], Result]) -> Result:
        """Do the work of these requests in the lane of their size. They are of one flow."""
        size = text_size(requests)
        lane = next(lane for most, lane in self._lanes if most is None or size <= most)
        found: Result = await lane.run(Work(share=_share(requests), size=size, do=work))
        return found

    @contextmanager
    def room_for(self, requests: Items[GenerationRequest]) -> Iterator[None]:
        """Count them to what waits for as long as it is entered. Short ones are bounded by their number.

        Raises Overloaded where they have no room: of what is free a flow leaves others as much as it has itself.
        """
        size, flow = text_size(requests), _share(requests).flow
        if size <= LONG_TEXT:
            yield
            return
        self._check_room(size, flow)
        self._num_waiting[flow] += size
        try:
            yield
        finally:
            self._num_waiting[flow] -= size
            self._num_waiting += Counter()  # forgets flows that have nothing

    def close(self) -> None:
        """Wait for what runs; what has not begun is dropped."""
        for _, lane in self._lanes:
            lane.close()

    def _check_room(self, size: int, flow: str) -> None:
        most, num_waiting = self._max_waiting_chars, self._num_waiting.total()
        if most is None or not num_waiting or self._num_waiting[flow] + HEADROOM * size <= most - num_waiting:
            return
        raise Overloaded(
            f"{size} more characters have no room beside {num_waiting} that wait to be cut into tokens, of {most}.",
            None,
            {"retry_after_s": RETRY_S},
        )


def _share(requests: Items[GenerationRequest]) -> Share:
    return requests[0].share if requests else Share()
