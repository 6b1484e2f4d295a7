"""Connections as the lobby has them."""

from __future__ import annotations

import socket
from typing import NamedTuple

from serve_app.http.caller import Caller
from serve_app.http.visits import Announced


class Guest:
    """A connection in the lobby. until: when it is closed if nothing comes, by the loop's clock"""

    __slots__ = ("address", "caller", "connection", "has_asked", "until")

    def __init__(self, connection: socket.socket, address: str, caller: Caller, until: float) -> None:
        self.connection = connection
        self.address = address
        self.caller = caller
        self.until = until
        self.has_asked = False


class Admitted(NamedTuple):
    """Whoever has sent a request for which there is a place. at: when it came"""

    guest: Guest
    data: bytes
    announced: Announced
    at: float


def is_sent(connection: socket.socket, response: bytes) -> bool:
    """Whether all of it. A client for whose few hundred bytes there is no room has not read what it was told before."""
    try:
        return connection.send(response) == len(response)
    except OSError:
        return False
