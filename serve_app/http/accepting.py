"""Has uvicorn's servers accept many connections per turn of the event loop.

libuv, and so uvloop, accepts one connection per listening socket and turn (libuv's pull request 3696). A turn of a
proxy takes milliseconds wherever another of its threads has Python's lock, so a thousand clients that come at once
would be accepted over many seconds, and whoever comes behind them, a health check too, waits for all of them.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import uvicorn

NUM_LISTENERS = 16
"""Descriptors of each listening socket, and so connections that are accepted in a turn."""

Startup = Callable[[uvicorn.Server, list[socket.socket] | None], Awaitable[None]]


def accepting_many(startup: Startup) -> Startup:
    """The same, with every listening socket watched through so many descriptors. The server closes them all."""

    async def start(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        if sockets is not None:
            sockets = [each for given in sockets for each in (given, *_copies(given))]
        await startup(server, sockets)

    return start


def _copies(listener: socket.socket) -> list[socket.socket]:
    return [listener.dup() for _ in range(NUM_LISTENERS - 1)]
