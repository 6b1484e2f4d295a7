"""The router's end of the shortcut: pieces of streams straight to the proxy that has their clients, where it can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.shortcut import (
    LINE,
    MAX_PIECE,
    NUM_PIECES,
    SIGNAL,
    WELCOME,
    framed,
    new_number,
    offered,
    path_of,
)

CONNECT_TIMEOUT_S = 1.0
"""For a proxy of this machine to be reached and to answer; else it is reached by Serve."""
AGAIN_S = 30.0
"""After which one that did not answer in time is tried again. Of one that is not there it is known for good."""
MAX_PROXIES = 64
"""That are remembered; those of long ago are not there any more."""


class TakesShortcuts:
    """ASGI middleware under which responses of several pieces go past Serve, as their requests offer it.

    A response of one piece goes as it did: it has nothing to gain. The bytes stay what they are.

    on_taken: called for each response that does
    """

    def __init__(self, app: ASGIApp, *, on_taken: Callable[[], None] = lambda: None) -> None:
        self._app = app
        self._on_taken = on_taken
        self._lines: dict[str, asyncio.Task[ProxysLine | None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        offer = offered(scope) if scope["type"] == "http" else None
        line = None if offer is None else await self._line_to(offer[0])
        if offer is None or line is None:
            await self._app(scope, receive, send)
            return
        shortcut = Shortcut(line, offer[1], send, on_taken=self._on_taken)
        line.begin(offer[1])
        try:
            await self._app(scope, receive, shortcut.send)
            await shortcut.flush()
        finally:
            line.forget(offer[1])

    def close(self) -> None:
        for connecting in self._lines.values():
            if not connecting.done():
                connecting.cancel()
            elif line := connecting.result():
                line.close()

    async def _line_to(self, name: str) -> ProxysLine | None:
        connecting = self._lines.pop(name, None)
        if connecting is None:
            if len(self._lines) >= MAX_PROXIES:
                self._forget_one()
            connecting = asyncio.create_task(self._connect(name))
        self._lines[name] = connecting  # behind all others, as it is used now
        line = await asyncio.shield(connecting)
        if line is not None and line.is_lost:
            self._lines.pop(name, None)
            return None
        return line

    async def _connect(self, name: str) -> ProxysLine | None:
        """None where nobody of this machine listens there, or is too busy to answer."""
        try:
            return await _connected(path_of(name))
        except TimeoutError:
            asyncio.get_running_loop().call_later(AGAIN_S, self._lines.pop, name, None)
        except OSError:
            pass
        return None

    def _forget_one(self) -> None:
        """One that leads nowhere, or else the one that was not used for longest, once nothing goes that way."""
        useless = (name for name, each in self._lines.items() if each.done() and each.result() is None)
        connecting = self._lines.pop(next(useless, None) or next(iter(self._lines)))
        if connecting.done() and (line := connecting.result()):
            line.retire()


class Shortcut:
    """The way of one response: its beginning and its end by Serve, what is between them by the line."""

    def __init__(self, line: ProxysLine, number: bytes, send: Send, *, on_taken: Callable[[], None]) -> None:
        self._line = line
        self._number = number
        self._send = send
        self._on_taken = on_taken
        self._start: Message | None = None  # held back until it is known whether there are several pieces
        self._num_pieces = 0
        self._is_taken = False

    async def send(self, message: Message) -> None:
        """Raises OSError where the proxy has gone."""
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body" and message.get("more_body", False):
            await self._send_piece(message.get("body", b""))
        else:
            await self.flush()
            await self._send({**message, NUM_PIECES: self._num_pieces} if self._is_taken else message)

    async def flush(self) -> None:
        """Have the beginning sent."""
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)

    async def _send_piece(self, piece: bytes) -> None:
        if not self._is_taken:
            assert self._start is not None, "a response begins before its pieces"
            self._is_taken = True
            self._on_taken()
            self._start = {**self._start, LINE: self._line.hello}
            await self.flush()
        self._num_pieces += await self._line.write(self._number, piece)


class ProxysLine(asyncio.Protocol):
    """The connection to one proxy. What is written in one turn of the loop goes out together."""

    def __init__(self) -> None:
        self.hello = new_number()
        self.welcomed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._frames: list[bytes] = []
        self._num_bytes = 0  # in them
        self._is_congested = False
        self._is_retired = False
        self._is_paused: dict[bytes, bool] = {}  # of each response that is open
        self._waiting: dict[asyncio.Future[None], bytes] = {}

    @property
    def is_lost(self) -> bool:
        """Known from the write that fails on, not only from the turn of the loop in which the transport says so."""
        return self._transport is not None and self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without being of the class
        self._transport.write(self.hello)

    def data_received(self, data: bytes) -> None:
        if not self.welcomed.done():
            self.welcomed.set_result(True)
            data = data[len(WELCOME) :]
        self._received += data
        end = len(self._received) // SIGNAL.size * SIGNAL.size
        for number, is_paused in SIGNAL.iter_unpack(self._received[:end]):
            if number in self._is_paused:
                self._is_paused[number] = is_paused
        self._received = self._received[end:]
        self._let_go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.welcomed.done():
            self.welcomed.set_result(False)
        self._let_go_on()

    def pause_writing(self) -> None:
        self._is_congested = True

    def resume_writing(self) -> None:
        self._is_congested = False
        self._let_go_on()

    async def write(self, number: bytes, piece: bytes) -> int:
        """Wait until this response may go on, and send more of it, all or nothing where the wait is given up.

        Returns of how many frames that was. Raises OSError where the proxy has gone.
        """
        while not self.is_lost and self._is_held(number):
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[waiting] = number
            try:
                await waiting
            finally:
                del self._waiting[waiting]
        if self.is_lost:
            raise BrokenPipeError("the proxy has gone")
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._write_out)
        frames = framed(number, piece)
        self._frames += frames
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_PIECE:
            self._write_out()
        return len(frames)

    def begin(self, number: bytes) -> None:
        """That response may be paused from now on."""
        self._is_paused[number] = False

    def forget(self, number: bytes) -> None:
        """That response is over."""
        self._is_paused.pop(number, None)
        if self._is_retired and not self._is_paused:
            self.close()

    def retire(self) -> None:
        """Close it behind the last of its responses."""
        self._is_retired = True
        if not self._is_paused:
            self.close()

    def close(self) -> None:
        """It is lost to whoever meant to use it."""
        self._write_out()
        if self._transport is not None:
            self._transport.close()

    def _is_held(self, number: bytes) -> bool:
        return self._is_congested or self._is_paused.get(number, False)

    def _write_out(self) -> None:
        frames, self._frames, self._num_bytes = self._frames, [], 0
        if frames and self._transport is not None and not self.is_lost:
            self._transport.write(b"".join(frames))

    def _let_go_on(self) -> None:
        for waiting, number in self._waiting.items():
            if not waiting.done() and (self.is_lost or not self._is_held(number)):
                waiting.set_result(None)


async def _connected(path: str) -> ProxysLine:
    """Raises OSError where nobody of this machine listens there, TimeoutError where nobody answers in time."""
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        _, line = await asyncio.get_running_loop().create_unix_connection(ProxysLine, path)
        is_welcome = False
        try:
            is_welcome = await line.welcomed
        finally:
            if not is_welcome:
                line.close()
        if not is_welcome:
            raise ConnectionResetError("the proxy did not want it")
        return line
