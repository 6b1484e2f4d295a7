"""How one connection stands with a turnstile: when it was told to come again, and whether it does."""

from __future__ import annotations

import math
import random

from serve_app.http.turnstile import MAX_RETRY_S, Turnstile

MAX_IN_A_ROW = 3
"""Refusals of one connection, after which it is not read for a while."""

MAX_EARLY = 2
"""Times before an appointment that whoever is awaited then may ask for something else over the same connection."""


class Caller:
    """Whoever comes when told finds a place, and loses it to nobody, its own tenant's other connections included.
    Whoever comes before that is told the same again, and gains nothing by it: a place that it is given early is not
    kept for it later. Whoever comes early again and again is not awaited, now nor after the next refusal.

    now: seconds, by the loop's clock, which is monotonic
    """

    def __init__(self, turnstile: Turnstile) -> None:
        self.is_due = False  # as it was told to come now
        self._turnstile = turnstile
        self._num_in_a_row = 0
        self._num_early = 0  # times that it came before it was told to, since it was told
        self._is_awaited = False  # at its appointment
        self._appointment_at = 0.0

    def is_one_too_many(self, flow: str, now: float) -> bool:
        """Whether there is no place for a request that it makes now."""
        self.is_due = self.may_be_due(now) and self._turnstile.keep(flow)
        return self._turnstile.is_full(flow, is_due=self.is_due)

    def may_be_due(self, now: float) -> bool:
        """Whether it was told to come, and not later than now."""
        return self._appointment_at <= now and self._is_awaited

    def enter(self, flow: str, now: float) -> None:
        """It has a place."""
        if self._appointment_at > now:
            self._await_no_more(flow)
        self.is_due, self._is_awaited, self._num_early, self._appointment_at = False, False, 0, 0.0

    def refuse(self, flow: str, now: float) -> int:
        """Seconds until the appointment that it has already, or a new one."""
        left_s = self._appointment_at - now
        if left_s > 0 and self._turnstile.settings.pause_s:
            self._turnstile.refuse_again()
            self._num_early += 1
            if self._num_early >= MAX_EARLY:
                self._await_no_more(flow)
            return math.ceil(left_s)
        self._is_awaited, self._num_early = self._num_early < MAX_EARLY, 0
        retry_after_s = self._turnstile.refuse(flow, is_kept=self._is_awaited)
        self._appointment_at = now + retry_after_s
        return retry_after_s

    def _await_no_more(self, flow: str) -> None:
        if self._is_awaited:
            self._turnstile.cancel(flow, self._appointment_at)
            self._is_awaited = False

    def send_away(self, retry_after_s: int, now: float) -> None:
        """The application refused it."""
        self._appointment_at = now + min(retry_after_s, MAX_RETRY_S)

    def please(self) -> None:
        """The application answered it."""
        self._num_in_a_row = 0

    def pause_s(self, now: float) -> float:
        """It was refused once more: for how long it is not read now."""
        self._num_in_a_row += 1
        pause_s = min(self._turnstile.settings.pause_s, self._appointment_at - now)
        if pause_s <= 0 or (self._num_in_a_row < MAX_IN_A_ROW and self._turnstile.reads_on()):
            return 0.0
        self._num_in_a_row = 0
        return pause_s * random.uniform(0.5, 1.0)  # nosec B311
