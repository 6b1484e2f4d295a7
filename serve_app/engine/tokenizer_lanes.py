"""Threads that prepare requests, so that a short prompt never waits for a long one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serve_app.core.request import GenerationRequest
from serve_app.engine.niceness import take_leftovers

Result = TypeVar("Result")

LANES = ((32_768, 2), (524_288, 1), (None, 1))
"""Characters and ids of all prompts together, at most, and threads. Long work is bounded to a thread, whoever sends it,
and takes what steps leave of a core."""


class TokenizerLanes:
    """One pool of threads per magnitude of work."""

    def __init__(self) -> None:
        self._pools = [
            (most, _pool(f"tokenizer-{number}", num_threads, is_long=number > 0))
            for number, (most, num_threads) in enumerate(LANES)
        ]

    async def run(self, requests: Items[GenerationRequest], work: Callable[[], Result]) -> Result:
        """Do the work of these requests in the lane of their size."""
        size = sum(each.num_chars + each.prompt.num_ids + len(each.prediction) for each in requests)
        pool = next(pool for most, pool in self._pools if most is None or size <= most)
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Wait for what runs; what has not begun is dropped."""
        for _, pool in self._pools:
            pool.shutdown(cancel_futures=True)


def _pool(name: str, num_threads: int, *, is_long: bool) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=take_leftovers if is_long else None)
