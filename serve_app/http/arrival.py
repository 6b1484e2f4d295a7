"""A connection on its way from the lobby to the server."""

from __future__ import annotations

import select
import socket
from dataclasses import dataclass

from serve_app.http.caller import Caller
from serve_app.http.visits import Announced


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """data: what came over it and nobody has answered
    headers_s: what is left for the rest of its headers
    announced: where a place was found for what came
    """

    data: bytes
    headers_s: float
    caller: Caller
    announced: Announced | None = None

    def end(self) -> None:
        """It is here, or has gone on the way."""
        if self.announced is not None:
            self.announced.arrive()


def has_ended(connection: socket.socket | None) -> bool:
    """Whether the client has closed its side, behind whatever of it is not read yet. Told by Linux alone."""
    if connection is None or not hasattr(select, "POLLRDHUP"):
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
