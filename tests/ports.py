"""Ports of this machine, for servers that tests start as programs of their own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Hold a port that nobody listens on, so that the kernel gives it to no test of another process."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # who asks for it by number gets it
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
