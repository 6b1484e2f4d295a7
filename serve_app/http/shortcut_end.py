"""The proxy's end of the shortcut: pieces of streams, as routers write them to a local socket, on to their clients."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import Message, Scope, Send

from serve_app.http.enclosed import Enclosing
from serve_app.http.lobby import Startup
from serve_app.http.shortcut import (
    LINE,
    NUM_PIECES,
    NUMBER_BYTES,
    SIGNAL,
    WELCOME,
    Frames,
    new_number,
    new_socket_name,
    offer,
    own_folder,
    path_of,
)

HIGH_BYTES = 65536
"""Of a response may wait for its client before its router is told to send no more of it."""
LOW_BYTES = 16384
"""Are left when it is told to go on."""
LAST_WORD_S = 2.0
"""For Serve to say how a response ended whose pieces came on a connection that has ended, too."""
ABANDONED_S = 60.0
"""Old at least is a socket that is taken for left behind."""

logger = logging.getLogger(__name__)


class ShortcutLost(OSError):
    """The connection on which the pieces of a response came has ended before the response did."""


class Relay:
    """The way of one response to its client: what Serve brings of it and, between that, what comes on a line."""

    def __init__(self, landing: Landing, send: Send, *, on_failure: Callable[[], None]) -> None:
        self.number = new_number()
        self.line: RoutersLine | None = None
        self._landing = landing
        self._send = send
        self._on_failure = on_failure
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._num_sent = 0
        self._num_due: int | None = None
        self._is_lost = False
        self._is_paused = False
        self._wake: asyncio.Future[None] | None = None
        self._sending: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """What Serve brings: a beginning, behind which pieces may come on a line, or an end, which waits for them.

        Raises ShortcutLost, and what sending raises.
        """
        if NUM_PIECES in message and self._sending is not None:
            self._num_due = message[NUM_PIECES]
            self._stir()
            await self._sending
        await self._send(message)
        if LINE in message:
            self.line = self._landing.lines.get(message[LINE])
            self._is_lost = self.line is None
            self._sending = asyncio.create_task(self._run())
            self._sending.add_done_callback(self._look_how_it_ended)

    def close(self) -> None:
        """Send no more."""
        if self._sending is not None:
            self._sending.cancel()

    def add(self, piece: bytes, line: RoutersLine) -> None:
        self.line = line
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > HIGH_BYTES:
            self._signal(is_paused=True)
        self._stir()

    def lose(self) -> None:
        """Nothing more will come."""
        self._is_lost = True
        self._stir()

    def _look_how_it_ended(self, sending: asyncio.Task[None]) -> None:
        if not sending.cancelled() and sending.exception() is not None:
            self._on_failure()

    async def _run(self) -> None:
        while self._num_due is None or self._num_sent < self._num_due:
            if not self._pieces:
                await self._more()
                continue
            pieces, self._pieces, self._num_bytes = self._pieces, [], 0
            await self._send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True})
            self._num_sent += len(pieces)
            if self._num_bytes <= LOW_BYTES:
                self._signal(is_paused=False)

    async def _more(self) -> None:
        """Wait for whatever comes next. Raises ShortcutLost where that is nothing any more."""
        self._wake = asyncio.get_running_loop().create_future()
        if not self._is_lost:
            await self._wake
        elif self._num_due is None:
            await self._hear_last_word(self._wake)
        else:
            raise ShortcutLost("the router's connection has ended")

    async def _hear_last_word(self, wake: asyncio.Future[None]) -> None:
        """A router closes its connections behind its last response, of which Serve may be slower to bring the end."""
        try:
            await asyncio.wait_for(wake, LAST_WORD_S)
        except TimeoutError:
            raise ShortcutLost("the router's connection has ended, and Serve says nothing") from None

    def _stir(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _signal(self, *, is_paused: bool) -> None:
        if self._is_paused != is_paused and self.line is not None:
            self._is_paused = is_paused
            self.line.signal(self.number, is_paused=is_paused)


class Landing:
    """The socket that routers of this machine connect to, and the responses that wait for pieces from there."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.enclosing = Enclosing()
        self.relays: dict[bytes, Relay] = {}
        self.lines: dict[bytes, RoutersLine] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen. Where that cannot be, as with folders that others may reach into, everything goes through Serve."""
        name = new_socket_name()
        try:
            _remove_abandoned(own_folder())
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: RoutersLine(self), path_of(name))
        except (OSError, AttributeError, NotImplementedError) as error:
            logger.warning("streams go through Serve, as there is no socket for them: %s", error)
        else:
            self.name = name

    def close(self) -> None:
        """Listen no more, and let go of every router."""
        for line in list(self.lines.values()):
            line.close()
        if self._server is not None and self.name is not None:
            self._server.close()
            Path(path_of(self.name)).unlink(missing_ok=True)
            self.name = None

    @contextmanager
    def relay(self, scope: Scope, send: Send, *, on_failure: Callable[[], None]) -> Iterator[Send]:
        """Offer a request the way past Serve; what its response is sent by meanwhile.

        on_failure: called where the line is lost before its end
        """
        if self.name is None:
            yield send
            return
        relay = Relay(self, send, on_failure=on_failure)
        self.relays[relay.number] = relay
        offer(scope, self.name, relay.number)
        try:
            yield relay.send
        finally:
            relay.close()
            del self.relays[relay.number]


class RoutersLine(asyncio.Protocol):
    """One connection of a router."""

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._frames = Frames()
        self._hello = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without being of the class

    def data_received(self, data: bytes) -> None:
        if len(self._hello) < NUMBER_BYTES:
            missing = NUMBER_BYTES - len(self._hello)
            self._hello, data = self._hello + data[:missing], data[missing:]
            if len(self._hello) < NUMBER_BYTES:
                return
            self._landing.lines[self._hello] = self
            self._write(WELCOME)
        for number, piece in self._frames.add(data):
            relay = self._landing.relays.get(number)
            if relay is not None:  # else its client has left
                relay.add(piece, self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._landing.lines.pop(self._hello, None)
        for relay in self._landing.relays.values():
            if relay.line is self:
                relay.lose()

    def signal(self, number: bytes, *, is_paused: bool) -> None:
        self._write(SIGNAL.pack(number, is_paused))

    def close(self) -> None:
        """Its routers hear of it at once, and the streams that come here end."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def opening(landing: Landing, startup: Startup) -> Startup:
    """The same way to start a server, which listens for routers first."""

    async def start(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        if landing.name is None:
            await landing.open()
        await startup(server, sockets)

    return start


def _remove_abandoned(folder: Path) -> None:
    """Sockets that nobody listens to: of proxies that were killed. One that is new may be about to be listened to."""
    for path in folder.glob("*.sock"):
        with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:  # another proxy removes them, too
            probe.setblocking(False)
            is_old = time.time() - path.lstat().st_mtime >= ABANDONED_S
            if is_old and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
