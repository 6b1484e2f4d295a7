"""Long bodies are taken in one after the other, so that many that come at once do not stop everything else.

A body of megabytes costs proxy and router tens of milliseconds: pieces are read, carried, put together and parsed. Ten
that come in one instant would have both cores of a small machine for as long as ten steps take; one after the other
they leave the others a core. All of them together take as long as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.enclosed import HEADER

LONG_BYTES = 262144
"""Of a body that waits for its turn. One whose length is not said waits as well."""
STALL_S = 0.02
"""For the next piece, after which a client has had its turn: others do not wait for who sends slowly."""
ANSWER_S = 0.1
"""For the router to take a body in and say something, after which the next one's turn begins at any rate."""


class Uploads:
    """One for all connections of a proxy.

    Law: nobody waits for who is ahead for longer than it takes that one's pieces to come, each within STALL_S, and
    ANSWER_S. What waits is not read, but for what is read already.
    """

    def __init__(self) -> None:
        self._turns = asyncio.Lock()

    def in_turn(self, app: ASGIApp) -> ASGIApp:
        """The same application, which hears of a request with a long body when it is its turn."""

        async def called_in_turn(scope: Scope, receive: Receive, send: Send) -> None:
            if not _has_long_body(scope):
                await app(scope, receive, send)
                return
            await self._turns.acquire()
            turn = Turn(self._turns.release, receive, send)
            try:
                await app(scope, turn.receive, turn.send)
            finally:
                turn.end()

        return called_in_turn


class Turn:
    """Of one request: until its body is there and something was said of it, or nothing more comes.

    pass_on: called once, when it ends
    """

    def __init__(self, pass_on: Callable[[], None], receive: Receive, send: Send) -> None:
        self._pass_on = pass_on
        self._receive = receive
        self._send = send
        self._has_ended = self._is_whole = False
        self._timer = asyncio.get_running_loop().call_later(ANSWER_S, self.end)

    async def receive(self) -> Message:
        if not self._is_whole:
            self._end_after(STALL_S)
        message = await self._receive()
        if message["type"] != "http.request":
            self.end()  # the client has left
        elif not message.get("more_body"):
            self._is_whole = True
            self._end_after(ANSWER_S)
        return message

    async def send(self, message: Message) -> None:
        self.end()
        await self._send(message)

    def end(self) -> None:
        """The next one's turn begins, if this has not ended before."""
        self._timer.cancel()
        if not self._has_ended:
            self._has_ended = True
            self._pass_on()

    def _end_after(self, seconds: float) -> None:
        self._timer.cancel()
        if not self._has_ended:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.end)


def _has_long_body(scope: Scope) -> bool:
    """As its headers tell, where it does not go with them."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length")
    if length is not None:
        return length.isdigit() and int(length) > LONG_BYTES
    return b"transfer-encoding" in headers and HEADER not in headers
