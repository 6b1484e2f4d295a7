"""Counts what a proxy has inside, and tells those whom it turns away when to come again."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.errors import Overloaded
from serve_app.router.appointments import Appointments
from serve_app.router.pace import Pace

MAX_REQUESTS = "SERVE_APP_PROXY_MAX_REQUESTS"
PAUSE_S = "SERVE_APP_PROXY_PAUSE_S"
MAX_RETRY_S = 30.0
"""A proxy knows what comes and goes, not what it is: what it foresees is not worth more."""
BELIEVED_S = 3.0
"""In which a full proxy is believed to answer all it has, before anything is measured: rather too short than long."""
REPORT_PERIOD_S = 30.0
HANDED_ON_PER_SLOT = 1.5
"""With half of them on their way no slot stands empty between one request and the next."""
MIN_HANDED_ON = 64
"""Before the router has told anything, and for models of few slots."""
MAX_WAIT_S = 5.0
"""In the proxy. Behind it the router sees the rest of a wait, and knows better which model it is for."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnstileSettings:
    """max_requests: that compute something, at once, streams until their end included; those that wait here too
    pause_s: a connection that was refused several times in a row is not read for so long; 0 where clients share
    connections, as those do who come through a load balancer
    """

    max_requests: int = 256
    pause_s: float = 5.0


def settings_of_environment() -> TurnstileSettings:
    """What the environment says. Raises ValueError where that is not possible."""
    defaults = TurnstileSettings()
    settings = TurnstileSettings(
        max_requests=int(os.environ.get(MAX_REQUESTS, defaults.max_requests)),
        pause_s=float(os.environ.get(PAUSE_S, defaults.pause_s)),
    )
    if settings.max_requests < 1:
        raise ValueError(f"{MAX_REQUESTS} must be at least 1; found {settings.max_requests}")
    if not 0 <= settings.pause_s <= MAX_RETRY_S:
        raise ValueError(f"{PAUSE_S} must be from 0 to {MAX_RETRY_S:g}; found {settings.pause_s}")
    return settings


class Visit:
    """A request, from when it is let in until it leaves, whatever becomes of it."""

    def __init__(self, turnstile: Turnstile, begin: Callable[[], None]) -> None:
        self.has_begun = False
        self._turnstile = turnstile
        self._begin = begin

    def begin(self) -> None:
        self.has_begun = True
        self._begin()

    def leave(self) -> None:
        self._turnstile.leave(self)


class Turnstile:
    """One for all connections of a proxy: lets so many requests in, and hands fewer of them on at once.

    To hand a request on costs the proxy and the router milliseconds each, and as much again where its client leaves. Of
    hundreds at once each would wait for all, the first no less than the last. So no more are handed on than keep the
    replicas busy: one and a half times what they compute at once, as the router tells with its responses. The others
    wait in their order, and cost nothing where they leave.

    Retry-After is an appointment, at the pace at which requests left while others waited or could have, and 30 s at
    most. Whoever is told the end of a long queue would be away when it went faster; whoever comes too early is refused
    once more, which costs next to nothing.
    """

    def __init__(
        self, settings: TurnstileSettings | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings or TurnstileSettings()
        self.num_slots = 0
        self.num_refused = 0
        self._num_told = 0  # of them to a router
        self._num_handed_on = 0
        self._waiting: dict[Visit, None] = {}
        self._clock = clock
        self._pace = Pace(self.settings.max_requests / BELIEVED_S, now=clock())
        self._appointments = Appointments(max_s=MAX_RETRY_S, clock=clock)
        self._reports_at = clock()
        self._num_reported = 0

    @property
    def num_inside(self) -> int:
        return self._num_handed_on + len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether one more would be too many, or would wait here for too long."""
        num_waiting = len(self._waiting)
        if self._num_handed_on + num_waiting >= self.settings.max_requests:
            return True
        return num_waiting > 0 and num_waiting >= MAX_WAIT_S * self._pace.per_s

    @property
    def max_handed_on(self) -> int:
        wanted = max(MIN_HANDED_ON, math.ceil(HANDED_ON_PER_SLOT * self.num_slots))
        return min(wanted, self.settings.max_requests)

    def enter(self, begin: Callable[[], None]) -> Visit:
        """Let a request in. begin: called when it is its turn, which may be now"""
        self._pace.note(self._clock(), is_busy=self._is_busy)
        visit = Visit(self, begin)
        self._waiting[visit] = None
        self._hand_on()
        return visit

    def leave(self, visit: Visit) -> None:
        """The request is over, or its client has gone."""
        self._pace.note(self._clock(), is_busy=self._is_busy, num_completed=1)
        if visit.has_begun:
            self._num_handed_on -= 1
        else:
            del self._waiting[visit]
        self._hand_on()

    def refuse(self) -> int:
        """Count it; the seconds after which the client is to come again."""
        self.num_refused += 1
        if self._clock() >= self._reports_at:
            self._report()
        return self._appointments.make(pace_per_s=self._pace.per_s)

    def refuse_again(self) -> None:
        """Count it; the client has an appointment already."""
        self.num_refused += 1

    def take_untold(self) -> int:
        """Refusals that no router was told of; it is being told now."""
        num_untold = self.num_refused - self._num_told
        self._num_told = self.num_refused
        return num_untold

    def refusal(self, retry_after_s: int) -> Overloaded:
        """What such a client is told."""
        return Overloaded(
            f"As many requests are being answered as may be at once ({self.settings.max_requests}); retry in"
            f" {retry_after_s} s.",
            None,
            {"retry_after_s": retry_after_s},
        )

    @property
    def _is_busy(self) -> bool:
        return self._num_handed_on >= self.max_handed_on

    def _hand_on(self) -> None:
        while self._waiting and self._num_handed_on < self.max_handed_on:
            visit = next(iter(self._waiting))
            del self._waiting[visit]
            self._num_handed_on += 1
            visit.begin()

    def _report(self) -> None:
        """A line now and then, beside what routers count."""
        self._reports_at = self._clock() + REPORT_PERIOD_S
        num_new = self.num_refused - self._num_reported
        self._num_reported = self.num_refused
        logger.warning(
            "refused since the last report: %d; handed on: %d, waiting: %d",
            num_new,
            self._num_handed_on,
            len(self._waiting),
        )
