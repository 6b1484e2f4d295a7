"""Where connections wait until they have sent something that the server has room for.

libuv, and so uvloop, accepts one connection per listening socket and turn (libuv's pull request 3696), and a transport
and a protocol for each cost more than the refusal that most of a crowd are told. A turn of a proxy takes milliseconds
wherever another of its threads has Python's lock, so of a thousand clients that come at once the last, and a health
check behind them, would wait for all of it. Here they are accepted many per turn, and whoever is to be refused is told
so by a write to its socket.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import uvicorn

from serve_app.api.dialects import UNION
from serve_app.http.arrival import Arrival, has_ended
from serve_app.http.caller import Caller
from serve_app.http.failures import request_id_of
from serve_app.http.glance import Glance, plain_post
from serve_app.http.guests import Admitted, Guest, is_sent
from serve_app.http.header_limits import HEADERS_TIMEOUT_S
from serve_app.http.turnstile import Turnstile
from serve_app.http.visits import Announced
from serve_app.http.written_refusals import WrittenRefusals

MAX_PER_TURN = 64
"""Connections that are accepted, or listened to, before the loop goes on with others."""
MAX_BROUGHT = 8
"""Requests that are handed to the server before the loop goes on."""
MAX_WAIT_S = 0.25
"""Of one who has a place, while others are told that there is none: that takes microseconds, and all that follows
milliseconds."""
MAX_READ = 65536
ACCEPT_AGAIN_S = 1.0
"""After the process had no descriptor left for a connection."""
SWEEP_S = 1.0
"""By which a connection over which nothing comes may be closed too late."""

Startup = Callable[[uvicorn.Server, list[socket.socket] | None], Awaitable[None]]

logger = logging.getLogger(__name__)


def through_lobby(startup: Startup, turnstile: Turnstile, refusals: WrittenRefusals) -> Startup:
    """The same way to start a server, whose clients come through a lobby.

    What is encrypted only the server can read, and a lobby needs Linux: elsewhere the server accepts by itself.
    """

    async def start(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        if sockets is None or server.config.ssl is not None or not hasattr(select, "epoll"):
            await startup(server, sockets)
            return
        await startup(server, [])
        lobby = Lobby(server, turnstile, refusals)
        lobby.open(sockets)
        server.servers.append(lobby)  # type: ignore[arg-type]  # of a server it is asked to close, no more

    return start


class Lobby:
    """Listens to connections that nothing is computed for.

    A request that is plain, and too many, is refused as `Shedding` would, with the pauses of those who come again too
    early; its connection stays. With whatever else comes, part of a request too, a connection is handed to the server
    for good.
    """

    def __init__(self, server: uvicorn.Server, turnstile: Turnstile, refusals: WrittenRefusals) -> None:
        self._server = server
        self._turnstile = turnstile
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._poll = select.epoll()
        self._listeners: list[socket.socket] = []
        self._listened_to: dict[int, Guest] = {}  # by descriptor
        self._paused: dict[Guest, asyncio.TimerHandle] = {}
        self._admitted: deque[Admitted] = deque()  # no longer listened to
        self._is_quiet = True
        self._handing_over: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Connections that are here."""
        return len(self._listened_to) + len(self._paused) + len(self._admitted)

    def open(self, listeners: list[socket.socket]) -> None:
        """Accept whoever comes."""
        self._listeners = listeners
        self._loop.add_reader(self._poll.fileno(), self._listen)
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(self._server.config.backlog)
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def close(self) -> None:
        """Accept nobody more, and let go of all who are here."""
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
        self._listeners = []
        self._loop.remove_reader(self._poll.fileno())
        for timer in (*self._paused.values(), self._sweeper):
            if timer is not None:
                timer.cancel()
        for each in self._admitted:
            each.announced.arrive()
            each.guest.connection.close()
        for guest in (*self._listened_to.values(), *self._paused):
            guest.connection.close()
        self._listened_to, self._paused, self._admitted = {}, {}, deque()
        self._poll.close()

    async def wait_closed(self) -> None:
        """Until nobody is on the way to the server any more."""
        await asyncio.gather(*self._handing_over, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_PER_TURN):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._accept_later(listener, error)
                return
            connection.setblocking(False)
            now = self._loop.time()
            self._hear(Guest(connection, address[0], Caller(self._turnstile), now + HEADERS_TIMEOUT_S), now)

    def _accept_later(self, listener: socket.socket, error: OSError) -> None:
        """Raises it where it is not for want of something that others may give back."""
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            raise error
        logger.warning("no connection is accepted for %g s: %s", ACCEPT_AGAIN_S, error)
        self._loop.remove_reader(listener.fileno())
        self._loop.call_later(ACCEPT_AGAIN_S, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _listen(self) -> None:
        now = self._loop.time()
        for number, _ in self._poll.poll(0, MAX_PER_TURN):
            self._hear(self._listened_to[number], now)

    def _hear(self, guest: Guest, now: float) -> None:
        """Take what it has sent, or listen to it."""
        try:
            data = guest.connection.recv(MAX_READ)
        except (BlockingIOError, InterruptedError):
            self._listen_to(guest)
            return
        except OSError:
            data = b""
        if not data:
            self._let_go(guest)
            return
        self._is_quiet = False
        try:
            self._judge(guest, data, now)
        except Exception:
            logger.exception("a connection is closed over which something came that nobody has thought of")
            self._let_go(guest)

    def _judge(self, guest: Guest, data: bytes, now: float) -> None:
        request = plain_post(data)
        if request is None:
            self._forget(guest)
            self._hand_over(guest, data, None, now)
            return
        flow = self._turnstile.flows.of(request.headers, guest.address)
        if self._turnstile.is_full(flow) and not guest.caller.may_be_due(now):  # of whom the server judges, once
            self._refuse(guest, request, flow, now)
        else:
            self._admit(guest, data, flow, now)

    def _admit(self, guest: Guest, data: bytes, flow: str, now: float) -> None:
        self._forget(guest)
        self._admitted.append(Admitted(guest, data, self._turnstile.announce(flow), now))
        if len(self._admitted) == 1:
            self._loop.call_soon(self._bring)

    def _bring(self) -> None:
        """Hand over those who have a place, where nobody is to be refused in this turn or the first has waited long."""
        now = self._loop.time()
        if self._admitted and (self._is_quiet or now >= self._admitted[0].at + MAX_WAIT_S):
            for _ in range(min(MAX_BROUGHT, len(self._admitted))):
                guest, data, announced, _ = self._admitted.popleft()
                self._hand_over(guest, data, announced, now)
        self._is_quiet = True
        if self._admitted:
            self._loop.call_soon(self._bring)

    def _refuse(self, guest: Guest, request: Glance, flow: str, now: float) -> None:
        state = self._server.server_state
        response = self._refusals.response(
            UNION, guest.caller.refuse(flow, now), server_headers=state.default_headers,
            request_id=request_id_of(request.request_id), is_last=request.is_last,
        )  # fmt: skip
        state.total_requests += 1
        guest.has_asked = True
        if is_sent(guest.connection, response) and not request.is_last:
            self._await_next(guest, now)
        else:
            self._let_go(guest)

    def _await_next(self, guest: Guest, now: float) -> None:
        pause_s = guest.caller.pause_s(now)
        guest.until = now + pause_s + self._server.config.timeout_keep_alive
        if pause_s:
            self._forget(guest)
            self._paused[guest] = self._loop.call_later(pause_s, self._end_pause, guest)
        else:
            self._listen_to(guest)

    def _end_pause(self, guest: Guest) -> None:
        del self._paused[guest]
        if has_ended(guest.connection):  # what it sent before would be computed for nobody
            guest.connection.close()
        else:
            self._hear(guest, self._loop.time())

    def _hand_over(self, guest: Guest, data: bytes, announced: Announced | None, now: float) -> None:
        headers_s = HEADERS_TIMEOUT_S if guest.has_asked else guest.until - now
        arrival = Arrival(data=data, headers_s=headers_s, caller=guest.caller, announced=announced)
        task = self._loop.create_task(self._connect(guest.connection, arrival))
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)

    async def _connect(self, connection: socket.socket, arrival: Arrival) -> None:
        config: Any = self._server.config
        protocol = partial(
            config.http_protocol_class, config=config, server_state=self._server.server_state,
            app_state=self._server.lifespan.state, _loop=self._loop, arrival=arrival,
        )  # fmt: skip
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio forgets it of accepted ones
            await self._loop.connect_accepted_socket(protocol, connection)
        except OSError:  # its client has gone
            connection.close()
        finally:
            arrival.end()

    def _listen_to(self, guest: Guest) -> None:
        number = guest.connection.fileno()
        if number not in self._listened_to:
            self._listened_to[number] = guest
            self._poll.register(number, select.EPOLLIN)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def _forget(self, guest: Guest) -> None:
        number = guest.connection.fileno()
        if self._listened_to.pop(number, None) is not None:
            self._poll.unregister(number)

    def _let_go(self, guest: Guest) -> None:
        self._forget(guest)
        guest.connection.close()

    def _sweep(self) -> None:
        now = self._loop.time()
        for guest in [guest for guest in self._listened_to.values() if guest.until <= now]:
            self._let_go(guest)
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep) if self._listened_to else None
