"""Refuses in Serve's proxy what is more than it can carry, as soon as the headers are there.

To pass a request on costs proxy and router milliseconds each; a thousand that come at once would keep both busy for
seconds in which nothing that was let in gets on. Even a refusal by the application, or by a middleware before it, costs
a task and its messages. One here is a look at a counter and bytes that are written already.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from functools import partial
from typing import Any, cast

import httptools
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serve_app.api.dialects import HEADER, UNION
from serve_app.api.paths import POSTED
from serve_app.http.arrival import has_ended
from serve_app.http.caller import Caller
from serve_app.http.enclosed import MAX_BYTES, enclose, without_body
from serve_app.http.failures import request_id_of, without_odd_id
from serve_app.http.flows import Headers as HeaderLines
from serve_app.http.glance import COUNTED_URLS
from serve_app.http.header_limits import LINGER_S, BoundedHeaders
from serve_app.http.headers import as_serve_can_read
from serve_app.http.own_words import Beginning, InOurWords
from serve_app.http.refusals import dialect_heard, error_response
from serve_app.http.shortcut import without_offer
from serve_app.http.shortcut_end import Landing
from serve_app.http.slots import SLOTS
from serve_app.http.turnstile import Turnstile
from serve_app.http.untold import tell
from serve_app.http.visits import Visit
from serve_app.http.written_refusals import WrittenRefusals

MAX_DROPPED_BYTES = 1024 * 1024
"""Of the body of a refused request. The connection of a larger one is closed, as that costs less than to read on."""
DROP_TIMEOUT_S = 10.0
"""For the rest of a refused request."""
DIALECT = HEADER.lower().encode()


class OverAndOut(Exception):
    """Raised through the parser of a connection that is being closed, which then reads no further."""


class Shedding(BoundedHeaders):
    """A protocol that passes on so many requests at once that compute something, and refuses those beyond.

    What only looks (health, metrics, models) always passes. A refused request is answered when its headers are there;
    what is left of it is read and dropped, and the connection goes on. A request that was sent behind another one,
    before the answer to that, waits for its turn and may be refused then.

    Clients may come again before their Retry-After: a few times in a row they are told the same at once, once only
    where very many come. Then their connection is left unread for a while (`pause_s`, and never beyond the
    appointment), so that whoever asks in a loop costs a few refusals per pause and not all of a processor. A client
    that keeps its appointments never notices. Whom the application sends away with a Retry-After is read as late.
    """

    drop_timeout_s = DROP_TIMEOUT_S

    def __init__(
        self,
        *args: Any,
        turnstile: Turnstile,
        refusals: WrittenRefusals,
        landing: Landing | None = None,
        beginning: Beginning | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._turnstile = turnstile
        self._landing = landing or Landing()
        self._beginning = beginning
        self._refusals = refusals
        self._is_dropping = False  # what is left of a refused request
        self._is_closing = False  # behind it
        self._num_dropped = 0
        self._drop_timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._caller = self._arrival.caller if self._arrival else Caller(turnstile)
        self._is_sent_away = False  # by the application
        self._visit: Visit | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._drop_timer, self._pause):
            if timer is not None:
                timer.cancel()
        if self._visit is not None and not self._visit.has_begun:
            self._visit.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_dropping and self._drop_timer is None:
            timeout_s = min(LINGER_S, self.drop_timeout_s) if self._is_closing else self.drop_timeout_s
            self._drop_timer = self.loop.call_later(timeout_s, self.transport.close)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_sent_away and self._is_idle() and not self.transport.is_closing():
            self._is_sent_away = False
            self._unset_keepalive_if_required()
            self._await_next_request()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._pause is None and self._is_idle():
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        if self._is_closing:
            raise OverAndOut
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_to_be_refused():
            self._await_nothing()
            self._refuse_request()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_dropping:
            super().on_body(body)
            return
        self._num_dropped += len(body)
        if self._num_dropped > MAX_DROPPED_BYTES:
            self._is_closing = True
            raise OverAndOut

    def on_message_complete(self) -> None:
        if not self._is_dropping:
            super().on_message_complete()
            return
        self._is_dropping = False
        if self._drop_timer is not None:
            self._drop_timer.cancel()
            self._drop_timer = None
        if self._is_closing:
            self.transport.close()
        else:
            self._await_next_request()

    def send_400_response(self, msg: str) -> None:
        """The parser failed: in a refused request, which has its answer, or elsewhere."""
        if self._is_dropping or self._is_closing:
            self._is_refused = self._is_closing = True  # no more is read
        else:
            super().send_400_response(msg)

    def _is_to_be_refused(self) -> bool:
        """Whether it computes something, is the next to be answered, and would be too many. An offer is read once more
        without it.
        """
        return (
            self.parser.get_method() == b"POST"
            and self._is_idle()
            and not self.parser.should_upgrade()
            and _is_counted(self.url)
            and self._caller.is_one_too_many(self._flow_of(self.headers), self.loop.time())
        )

    def _flow_of(self, headers: HeaderLines) -> str:
        return self._turnstile.flows.of(headers, self.client[0] if self.client else "")

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse_request(self) -> None:
        headers = dict(reversed(self.headers))
        self._is_dropping = True
        self._num_dropped = 0
        self._is_closing = self._is_last(int(headers.get(b"content-length", 0)))
        response = self._refusals.response(
            dialect_heard(cast(Scope, self.scope), UNION) if DIALECT in headers else UNION,
            self._caller.refuse(self._flow_of(self.headers), self.loop.time()),
            server_headers=self.server_state.default_headers,
            request_id=request_id_of(headers.get(b"x-request-id", b"").decode("latin-1")),
            is_last=self._is_closing,
        )
        self.transport.write(response)
        self.server_state.total_requests += 1
        if self.flow.write_paused:  # it sends without reading
            self.flow.pause_reading()

    def _is_last(self, num_bytes: int) -> bool:
        """Whether the connection ends with this request. Of a body that was only offered nobody knows if it comes."""
        keeps_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        return not keeps_alive or self.expect_100_continue or num_bytes > MAX_DROPPED_BYTES

    def _await_next_request(self) -> None:
        if self._pause is not None:
            return
        if pause_s := self._caller.pause_s(self.loop.time()):
            self.flow.pause_reading()
            self._pause = self.loop.call_later(pause_s, self._end_pause)
        else:
            self._await_until_timeout()

    def _end_pause(self) -> None:
        self._pause = None
        if not self._is_idle() or self.transport.is_closing():
            return
        if has_ended(self.transport.get_extra_info("socket")):  # what it sent before would be computed for nobody
            self.transport.close()
        else:
            self.flow.resume_reading()
            self._await_until_timeout()

    def _await_until_timeout(self) -> None:
        """As after any response: a connection over which nothing more comes is closed."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """app: of a type that uvicorn spells otherwise than starlette"""
        if not _computes(cast(Scope, cycle.scope)):
            self._tell(cast(Scope, cycle.scope))
            super()._start_asgi_task(cycle, cast(Any, InOurWords(app, self._beginning)))
            return
        flow = self._flow_of(cycle.scope["headers"])
        if self._turnstile.is_full(
            flow, is_due=self._caller.is_due
        ):  # it has waited behind another one of its connection
            super()._start_asgi_task(cycle, cast(Any, self._refuse_late))
        else:
            begin = partial(super()._start_asgi_task, cycle, cast(Any, self._counted(app, cycle)))
            is_due = self._caller.is_due
            self._caller.enter(flow, self.loop.time())
            self._visit = self._turnstile.enter(begin, flow, is_due=is_due)

    def _counted(self, app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            visit = self._visit
            assert visit is not None, "it was let in"
            headers = scope["headers"]

            async def listening(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._turnstile.num_slots = message.get(SLOTS, self._turnstile.num_slots)
                    self._turnstile.flows.note(headers, message)
                    self._landing.enclosing.note(message)
                    self._note(message)
                await send(message)

            try:
                self._tell(scope)
                if self._may_enclose(cycle):
                    receive = await enclose(scope, receive)
                with self._landing.relay(scope, listening, on_failure=self.transport.close) as relaying:
                    await InOurWords(self._turnstile.uploads.in_turn(app), self._beginning)(scope, receive, relaying)
            finally:
                visit.leave()

        return counted

    def _may_enclose(self, cycle: RequestResponseCycle) -> bool:
        """Whether the body is short and all there, and whoever is asked takes it with the request."""
        is_whole = not cycle.more_body and len(cycle.body) <= MAX_BYTES
        return is_whole and self._landing.name is not None and self._landing.enclosing.is_known

    def _tell(self, scope: Scope) -> None:
        """What only a proxy may say, and no client, and an id that is every line's in the log."""
        without_offer(scope)
        without_body(scope)
        without_odd_id(scope)
        as_serve_can_read(scope)
        tell(scope, self._turnstile.take_untold())

    def _note(self, start: Message) -> None:
        """Whether the application tells the client to come again later, and when."""
        told = dict(start["headers"]).get(b"retry-after", b"") if start["status"] in (429, 503) else b""
        self._is_sent_away = told.isdigit()
        if self._is_sent_away:
            self._caller.send_away(int(told), self.loop.time())
        else:
            self._caller.please()

    async def _refuse_late(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._turnstile.refusal(self._turnstile.refuse(self._flow_of(scope["headers"])))
        response = error_response(error, dialect_heard(scope, UNION))
        response.headers["x-request-id"] = request_id_of(Headers(scope=scope).get("x-request-id", ""))
        await response(scope, receive, send)


def _computes(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"].removeprefix(scope["root_path"]).rstrip("/") in POSTED


def _is_counted(url: bytes) -> bool:
    """The same of what the parser has read."""
    if url in COUNTED_URLS:
        return True
    path = (httptools.parse_url(url).path or b"").decode("latin-1")
    return urllib.parse.unquote(path).rstrip("/") in POSTED
