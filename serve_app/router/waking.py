"""Wakes models that were scaled to zero, and has their requests wait until a replica is ready."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from serve_app.core.errors import ModelLoading
from serve_app.router.admission import Ticket
from serve_app.router.fleet import ASLEEP, LOADING_RETRY_S, Fleet
from serve_app.router.patience import begin

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Requests of one router that wait for one model; the router refuses more at once."""
MAX_WAKE_S = 600.0
"""After so long a wake is given up; the next request begins another one."""
FAILED_S = 1.0
"""Until the next attempt after one that failed."""

Answer = TypeVar("Answer")
Wake = Callable[[str], Awaitable[object]]
"""Has a replica of the model started, and returns once one has answered."""


@dataclass(slots=True, kw_only=True)
class _Waking:
    """A model that is being woken. began: seconds, by the clock;  waiters: one for each request"""

    began: float
    waiters: set[asyncio.Future[None]] = field(default_factory=set)


class Waker:
    """Wakes each model once, however many requests wait for it.

    wake:  None where nobody can wake a model; then requests are refused at once
    clock: seconds, monotonic
    """

    def __init__(self, fleet: Fleet, wake: Wake | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._wake = wake
        self._clock = clock
        self._waking: dict[str, _Waking] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._took_s: dict[str, float] = {}  # the last time, by model

    async def once_awake(
        self, attempt: Callable[[], Answer], ticket: Ticket | None = None, *, max_wait_s: float
    ) -> Answer:
        """Return what the attempt returns. Where it meets a sleeping model, wake that, wait, and attempt it again.

        ticket: of the request; while it waits, it holds no place that others could use
        Raises what the attempt raises, and ModelLoading after `max_wait_s`, with the time until the model is ready.
        """
        ends_at = self._clock() + max_wait_s
        while True:
            try:
                return attempt()
            except ModelLoading as error:
                model = error.facts.get(ASLEEP)
                if self._wake is None or not isinstance(model, str):
                    raise
            with nullcontext() if ticket is None else ticket.resting():
                await self._wait(model, self._wake, ticket, ends_at)
            if ticket is not None:
                await ticket.turn()

    async def _wait(self, model: str, wake: Wake, ticket: Ticket | None, ends_at: float) -> None:
        """Wait until the model is awake, or a wake has failed."""
        if model not in self._waking:
            self._waking[model] = _Waking(began=self._clock())
            begin(self._run(model, wake), self._tasks)
        waking = self._waking[model]
        if len(waking.waiters) >= MAX_WAITING:
            raise self._not_ready(model, waking)
        waiter = asyncio.get_running_loop().create_future()
        waking.waiters.add(waiter)
        try:
            async with asyncio.timeout(max(0.0, ends_at - self._clock())):
                if ticket is not None:
                    ticket.ends_by(lambda error: None if waiter.done() else waiter.set_exception(error))
                await waiter
        except TimeoutError:
            raise self._not_ready(model, waking) from None
        finally:
            waking.waiters.discard(waiter)

    async def _run(self, model: str, wake: Wake) -> None:
        waking = self._waking[model]
        try:
            async with asyncio.timeout(MAX_WAKE_S):
                await wake(model)
                await self._fleet.until_there(model)
            self._took_s[model] = self._clock() - waking.began
        except Exception:
            logger.warning("model %s could not be woken", model, exc_info=True)
            await asyncio.sleep(FAILED_S)
        finally:
            del self._waking[model]
            for waiter in waking.waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _not_ready(self, model: str, waking: _Waking) -> ModelLoading:
        """Return the refusal, with the time that is left by what the last start took."""
        left_s = self._took_s.get(model, 0.0) - (self._clock() - waking.began)
        seconds = math.ceil(left_s) if left_s > 0 else int(LOADING_RETRY_S)
        message = f'Model "{model}" was asleep, and its first replica is starting; retry in {seconds} s.'
        return ModelLoading(message, "model", {"retry_after_s": seconds})
