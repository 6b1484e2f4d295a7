"""One timer bounds every wait of a task, and is no other than a timer for each would be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.http.streams import Patience
from tests.fakes import settle


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the timers that are set."""

    def __init__(self) -> None:
        super().__init__()
        self.num_timers = 0

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        self.num_timers += 1
        return super().call_at(when, callback, *args, **kwargs)


async def turn() -> str:
    await asyncio.sleep(0)
    return "came"


def test_a_thousand_waits_that_end_in_time_set_one_timer() -> None:
    async def waits() -> None:
        with Patience() as patience:
            for number in range(1000):
                assert await patience.wait(turn(), 60 if number % 2 else 3600) == "came"

    loop = CountingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(waits())
        assert loop.num_timers == 2, "the second wait is the shorter one and moves the timer, no other does"


async def test_what_takes_too_long_is_cancelled_and_the_next_wait_begins_anew() -> None:
    was_cancelled = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    with Patience() as patience:
        for _ in range(3):
            was_cancelled.clear()
            with pytest.raises(TimeoutError):
                await patience.wait(forever(), 0.001)
            assert was_cancelled.is_set()
            assert await patience.wait(turn(), 60) == "came"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "nothing of it is left on the task"


class WoundLoop(asyncio.SelectorEventLoop):
    """Its clock is put forward by hand."""

    wound_s = 0.0

    def time(self) -> float:
        return super().time() + self.wound_s


def test_a_later_wait_is_bounded_though_the_timer_was_set_for_an_earlier_one() -> None:
    loop = WoundLoop()

    async def later() -> None:
        with Patience() as patience:
            await patience.wait(turn(), 1000)
            await patience.wait(asyncio.Event().wait(), 2000)

    async def waits() -> None:
        waiting = asyncio.create_task(later())
        await settle()
        loop.wound_s += 1500
        await settle()
        assert not waiting.done(), "the time of the earlier one is over"
        loop.wound_s += 1000
        await settle()
        assert isinstance(waiting.exception(), TimeoutError)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(waits())


async def test_who_is_cancelled_by_somebody_else_is_cancelled() -> None:
    async def waits() -> None:
        with Patience() as patience:
            await patience.wait(asyncio.Event().wait(), 60)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_what_is_waited_for_is_raised_as_it_is() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("its own")

    with Patience() as patience, pytest.raises(ValueError, match="its own"):
        await patience.wait(fails(), 60)
