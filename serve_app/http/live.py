"""GET /live: what a router knows of its replicas and queues, once or as events for as long as somebody listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from serve_app.api.listings import Moment, OpenRequests, QueueState, ScaleState, replica_state
from serve_app.api.sse import dump, event
from serve_app.core.errors import DeadlineExceeded, Overloaded, ServeError
from serve_app.core.ledger import CLIENT_LEFT
from serve_app.http.exchange import ClientGone, Exchange, watched
from serve_app.http.metrics import Served
from serve_app.http.streams import in_time
from serve_app.router.admission import Admission, Reason
from serve_app.router.fleet import Fleet

EVENTS = "text/event-stream"
NO_STORE = [(b"cache-control", b"no-store")]
PERIOD_S = 1.0
MAX_LISTENERS = 64
"""Streams of events at once. Each costs a timer; all share one body a second."""
MAX_EVENTS = 300
"""Events of one stream; a client that wants more asks again."""


class Live:
    """A raw ASGI application. It passes no admission, as it waits for no replica.

    max_stall_s: a listener that reads nothing for so long is given up
    clock:       Unix seconds
    """

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        *,
        max_stall_s: float = 60.0,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.num_listeners = 0
        self.num_written = 0
        self._fleet = fleet
        self._admission = admission
        self._max_stall_s = max_stall_s
        self._period_s = period_s
        self._clock = clock
        self._last_event = b""
        self._last_at = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(send)
        if not _wants_events(scope):
            await exchange.respond(200, asdict(self.moment()), headers=NO_STORE)
        elif await self._listened(receive, exchange, scope["state"]["admit_again"]):
            scope["state"]["served"] = Served(status=CLIENT_LEFT, run=None)

    def moment(self) -> Moment:
        """Return how everything stands now."""
        admission = self._admission
        waits = admission.predicted_waits_s
        return Moment(
            router=self._fleet.router_id,
            at=round(self._clock(), 3),
            requests=OpenRequests(open=admission.num_open, limit=admission.settings.max_open_requests),
            refused={reason.value: admission.refusals[reason] for reason in Reason},
            models=[
                QueueState(id=model, sequences=inside, places=places, wait_s=round(waits.get(model, 0.0), 3))
                for model, (inside, places) in admission.sequences.items()
            ],
            loading=list(self._fleet.loading),
            asleep=list(self._fleet.asleep),
            scales=[ScaleState(id=model, **asdict(scale)) for model, scale in sorted(self._fleet.scales.items())],
            replicas=[replica_state(card, load) for card, load in self._fleet.replicas],
        )

    async def _listened(self, receive: Receive, exchange: Exchange, admit_again: Callable[[], object]) -> bool:
        """Send events until there were enough, the router is stopped or the key is revoked; True where the client left.

        Raises Overloaded where too many listen.
        """
        if self.num_listeners >= MAX_LISTENERS:
            facts = {"retry_after_s": 5}
            raise Overloaded(f"As many listen as may at once ({MAX_LISTENERS}); retry in 5 s.", None, facts)
        self.num_listeners += 1
        has_left = False
        try:
            await watched(self._send_events(exchange, admit_again), receive, exchange)
        except* (ClientGone, DeadlineExceeded):
            has_left = True
        finally:
            self.num_listeners -= 1
        return has_left

    async def _send_events(self, exchange: Exchange, admit_again: Callable[[], object]) -> None:
        for _ in range(MAX_EVENTS):
            await in_time(exchange.stream(self._event()), self._max_stall_s)
            await asyncio.sleep(self._period_s)
            if self._admission.is_stopped:
                break
            try:
                admit_again()
            except ServeError as error:
                await in_time(exchange.fail(error), self._max_stall_s)
                return
        await in_time(exchange.end_stream(b""), self._max_stall_s)

    def _event(self) -> bytes:
        """Return the body that all listeners share, written anew once it is half a period old."""
        now = self._clock()
        if not 0 <= now - self._last_at < self._period_s / 2:
            self._last_event, self._last_at = event(dump(asdict(self.moment()))), now
            self.num_written += 1
        return self._last_event


def _wants_events(scope: Scope) -> bool:
    """Refuse a stream to a client of HTTP/1.0, which would get all events in one piece, minutes later."""
    has_time = scope["method"] == "GET" and scope.get("http_version") != "1.0"
    return has_time and EVENTS in Headers(scope=scope).get("accept", "")
