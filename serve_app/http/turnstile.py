"""Counts what a proxy has inside, and tells those whom it turns away when to come again."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.errors import Overloaded
from serve_app.http.bookings import Bookings
from serve_app.http.flows import Flows
from serve_app.http.lines import Lines
from serve_app.http.presence import Presence, take_one
from serve_app.http.uploads import Uploads
from serve_app.http.visits import Announced, Visit
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
MAX_READ_ON_PER_S = 1000.0
"""Refused connections that are read on at once, and may be refused again: some 3 % of a processor. Of 1800 that come
again at once more than half are told so again at once, too."""
BELIEF_S = 1.0
"""Busy seconds that this weighs as much as: those told by it come again too early, and are the first of all."""
MAX_WAIT_S = 5.0
"""In the proxy. Behind it the router sees the rest of a wait, and knows better which model it is for."""
PLACES_PER_FREE_ONE = 3
"""That one tenant may have for each that is free: three quarters of all where it is alone, a fifth each where there are
five that want them all, and some for whoever comes besides."""
MAX_BOOKS = 1024
"""Of appointments: one for each of so many flows that were refused last."""
MORE_IF_DUE = 3
"""Who was told to come now may find so many times as many before it: the pace that was measured was not quite right."""
MAX_WAIT_IF_DUE_S = 1.5 * MAX_RETRY_S
"""And wait for longer than it might be told to: others may take more meanwhile than when it was told."""
BOOKED = 0.75
"""Of the pace: were it all promised, chance would make a queue of those who come when told that never gets shorter."""
MOST_BOOKED = 4
"""One of so many places is left at most for those who were told to come now: they may not."""
MOST_EXTRA = 2
"""Half as many as all places are there beyond them, for those who come when told and find none: whoever is told twice
does not obey a third time. They wait first of their flow, and take no place of another."""
KEPT = 8
"""One of so many that are handed on at once is kept for tenants below their share."""
FILLED_PER_SLOT = 1.25
"""That tenants above it have handed on at most, so that no slot stands empty between one request and the next."""
LEAST_EACH = 6
"""Of each tenant may be handed on, or its share, whatever the others have; of all together twice as many at most."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnstileSettings:
    """max_requests: that compute something, at once, streams until their end included; those that wait here too
    pause_s: a connection that was refused several times in a row, or once of very many, is not read for so long; 0
    where clients share connections, as those do who come through a load balancer
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


class Turnstile:
    """One for all connections of a proxy: lets so many requests in, and hands fewer of them on at once.

    To hand a request on costs the proxy and the router milliseconds each, and as much again where its client leaves. Of
    hundreds at once each would wait for all, the first no less than the last. So no more are handed on than keep the
    replicas busy: one and a half times what they compute at once, as the router tells with its responses. The others
    wait in their order, and cost nothing where they leave.

    Each tenant's wait in an order of their own: the next turn is of who has the fewest handed on for its weight. Where
    there is more than one, all together fill the replicas' slots and some more, and each may have its share handed
    on, or a few, whatever the others have: a replica knows better whose turn it is than who comes first here.

    Retry-After is an appointment, at the pace at which requests left while others waited or could have, a tenant's own
    part of it where there are several, and 30 s at most. Whoever is told the end of a long queue would be away when it
    went faster; whoever comes too early is refused once more, which costs next to nothing. Who comes when told finds a
    place: those whose last request has just been answered do not take it, nor those who come before they were told to.
    """

    def __init__(
        self, settings: TurnstileSettings | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings or TurnstileSettings()
        self.flows = Flows()
        self.uploads = Uploads()
        self.num_slots = 0
        self.num_refused = 0
        self._num_told = 0  # of them to a router
        self._num_handed_on = self._num_extra = 0
        self._handed_on: Counter[str] = Counter()  # by flow, as is the next; none is there with nothing
        self._announced: Counter[str] = Counter()
        self._lines = Lines()
        self._clock = clock
        self._pace = Pace(self.settings.max_requests / BELIEVED_S, now=clock(), belief_s=BELIEF_S)
        self._presence = Presence(self.flows, clock=clock)
        self._bookings: OrderedDict[str, Bookings] = OrderedDict()
        self._reports_at = clock()
        self._num_reported = 0
        self._num_to_read_on = MAX_READ_ON_PER_S
        self._counted_at = clock()

    @property
    def num_inside(self) -> int:
        """But for those beyond all places."""
        return self._num_handed_on + len(self._lines) - self._num_extra

    def is_full(self, flow: str = "", *, is_due: bool = False) -> bool:
        """Whether one more of this flow would be too many, or would wait here for too long.

        is_due: it was told to come now, as `keep` says
        """
        has_extra = is_due and self._num_extra < self.settings.max_requests // MOST_EXTRA
        return (self._has_no_place(flow, is_due=is_due) and not has_extra) or self._waits_long(flow, is_due=is_due)

    def _has_no_place(self, flow: str, *, is_due: bool) -> bool:
        """For others than those who are due these count as if they were here."""
        num_due, more = (0, MORE_IF_DUE) if is_due else (self._num_due(flow), 1)
        num_free = self.settings.max_requests - self.num_inside - self._announced.total()
        is_much = self._presence.inside[flow] + self._announced[flow] + num_due >= more * PLACES_PER_FREE_ONE * num_free
        return num_free <= num_due or (self.flows.has_tenants and is_much)

    def _waits_long(self, flow: str, *, is_due: bool) -> bool:
        """Who is due waits for those before it who were, and hardly for the others of its flow."""
        num_due, max_wait_s = (0, MAX_WAIT_IF_DUE_S) if is_due else (self._num_due(flow), MAX_WAIT_S)
        num_waiting = self._lines.num_of(flow, is_due=is_due) + self._announced[flow]
        return num_waiting > 0 and num_waiting + num_due >= max_wait_s * self._pace_of(flow)

    @property
    def max_handed_on(self) -> int:
        wanted = max(MIN_HANDED_ON, math.ceil(HANDED_ON_PER_SLOT * self.num_slots))
        return min(wanted, self.settings.max_requests)

    def announce(self, flow: str) -> Announced:
        """Somebody of this flow who has found a place is on the way: until that has ended it is taken."""
        self._announced[flow] += 1
        return Announced(self._announced, flow)

    def enter(self, begin: Callable[[], None], flow: str = "", *, is_due: bool = False) -> Visit:
        """Let a request in. begin: called when it is its turn, which may be now;  is_due: as `is_full` was told"""
        self._pace.note(self._clock(), is_busy=self._is_busy)
        is_extra = is_due and self._has_no_place(flow, is_due=True)
        visit = Visit(self.leave, begin, flow, is_due=is_due, is_extra=is_extra)
        self._num_extra += visit.is_extra
        self._presence.enter(flow)
        self._lines.add(visit)
        self._hand_on()
        return visit

    def leave(self, visit: Visit) -> None:
        """The request is over, or its client has gone."""
        self._pace.note(self._clock(), is_busy=self._is_busy, num_completed=1)
        self._num_extra -= visit.is_extra
        self._presence.leave(visit.flow)
        if visit.has_begun:
            self._num_handed_on -= 1
            take_one(self._handed_on, visit.flow)
        else:
            self._lines.remove(visit)
        self._hand_on()

    def refuse(self, flow: str = "", *, is_kept: bool = True) -> int:
        """Count it; the seconds after which the client is to come again, when a place is kept for it or is not."""
        self.num_refused += 1
        if self._clock() >= self._reports_at:
            self._report()
        name = self._book_of(flow)
        bookings = self._bookings.pop(name, None) or Bookings(max_s=MAX_RETRY_S, clock=self._clock)
        self._bookings[name] = bookings
        if len(self._bookings) > MAX_BOOKS:
            self._bookings.popitem(last=False)
        ahead_s = (self._lines.num_of(flow) + self._num_due(flow)) / self._pace_of(flow)
        pace_per_s = BOOKED * (self._pace_of(flow) if self.flows.has_tenants else self._pace.per_s)
        return bookings.make(pace_per_s=pace_per_s, excess_s=max(0.0, ahead_s - MAX_WAIT_S / 2), is_kept=is_kept)

    def keep(self, flow: str = "") -> bool:
        """Somebody comes who may have been told to come now: whether that is so of one who has not come yet."""
        bookings = self._bookings.get(self._book_of(flow))
        return bookings is not None and bookings.keep()

    def cancel(self, flow: str, at: float) -> None:
        """Who was told to come then is here already. at: by this clock"""
        bookings = self._bookings.get(self._book_of(flow))
        if bookings is not None:
            bookings.cancel(at)

    def refuse_again(self) -> None:
        """Count it; the client has an appointment already."""
        self.num_refused += 1

    def reads_on(self) -> bool:
        """Whether the connection that was refused just now is read on at once, or there are too many of them."""
        now = self._clock()
        regained = (now - self._counted_at) * MAX_READ_ON_PER_S
        self._counted_at = now
        self._num_to_read_on = min(MAX_READ_ON_PER_S, self._num_to_read_on + regained)
        if self._num_to_read_on < 1:
            return False
        self._num_to_read_on -= 1
        return True

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

    def _book_of(self, flow: str) -> str:
        return flow if self.flows.has_tenants else ""

    def _num_due(self, flow: str) -> int:
        """Places that are left for those of the flow who are to come now."""
        bookings = self._bookings.get(self._book_of(flow))
        return 0 if bookings is None else min(bookings.num_due, self.settings.max_requests // MOST_BOOKED)

    def _pace_of(self, flow: str) -> float:
        """Of the requests that leave, those of one flow: as many as of those that left last, and at least its share.

        Those inside would tell another part: whoever sends few is soon done, and whoever sends many waits.
        """
        part_inside = (self._presence.inside[flow] + 1) / (self.num_inside + 1)
        part = max(self._presence.part_of(flow, belief=part_inside), self._presence.share_of(flow))
        return self._pace.per_s * part

    @property
    def _is_busy(self) -> bool:
        """From then on only tenants below their share have requests handed on, or nobody where there are none."""
        if not self.flows.has_tenants:
            return self._num_handed_on >= self.max_handed_on
        most = self.max_handed_on - self.max_handed_on // KEPT
        filled = math.ceil(FILLED_PER_SLOT * self.num_slots) or most
        return self._num_handed_on >= min(most, filled)

    def _hand_on(self) -> None:
        while self._lines:
            flow = min(self._lines.flows, key=lambda each: self._handed_on[each] / self.flows.weight_of(each))
            if self._is_busy and not self._is_below_share(flow):
                return
            visit = self._lines.take(flow)
            self._num_handed_on += 1
            self._handed_on[flow] += 1
            visit.begin()

    def _is_below_share(self, flow: str) -> bool:
        """Or has few: one more of it is handed on however many others are, who may be behind it in a replica."""
        most = max(LEAST_EACH, self.max_handed_on * self._presence.share_of(flow))
        is_bounded = self.flows.has_tenants and self._num_handed_on < 2 * self.max_handed_on
        return is_bounded and self._handed_on[flow] < most

    def _report(self) -> None:
        """A line now and then, beside what routers count."""
        self._reports_at = self._clock() + REPORT_PERIOD_S
        num_new, self._num_reported = self.num_refused - self._num_reported, self.num_refused
        told = "refused since the last report: %d; handed on: %d, waiting: %d"
        logger.warning(told, num_new, self._num_handed_on, len(self._lines))
