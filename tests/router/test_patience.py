"""What stood still has not waited."""

from __future__ import annotations

import asyncio
import time

import pytest

from serve_app.router.patience import patience


async def test_who_waits_too_long_is_told_and_what_was_in_time_is_not_disturbed() -> None:
    with pytest.raises(TimeoutError):
        async with patience(0.01):
            await asyncio.Event().wait()
    async with patience(60):
        await asyncio.sleep(0)
    assert not asyncio.all_tasks() - {asyncio.current_task()}


async def test_an_answer_that_lay_there_when_its_process_went_on_is_in_time() -> None:
    loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    async with patience(1.0):
        time.sleep(1.5)  # noqa: ASYNC251 # as SIGSTOP does
        loop.call_soon(lambda: loop.call_soon(answer.set_result, "there"))  # as a socket is read: behind the timers
        assert await answer == "there"


async def test_a_cancellation_is_none_of_its_business() -> None:
    async def wait() -> None:
        async with patience(60):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
