"""The side of those who ask: a process apart, begun when it is needed, and its children."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from serve_app.core.errors import EngineFailed
from serve_app.core.machine import command, variables

COURTEOUS_PRIORITY = 10
GRACE_S = 0.3
"""Beyond the time that a child's own clock gives it."""


class ForkServer:
    """Threads may share it. The process begins with the first child, or where it was lost.

    module: run as a program; it calls `serve_forks`
    first:  what it is given before anything else; pickled
    doing:  of the process, for messages
    """

    def __init__(self, module: str, first: object, *, doing: str) -> None:
        self._module = module
        self._first = first
        self._doing = doing
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """None before the first child, and once it was closed."""
        return self._process

    def open(self) -> Connection:
        """A connection to a fresh child. Raises EngineFailed."""
        for _ in range(2):
            ours, theirs = socket.socketpair()
            with theirs, self._lock:
                try:
                    socket.send_fds(self._started(), [b"t"], [theirs.fileno()])
                except OSError:
                    ours.close()
                    self._end()
                    continue
            return Connection(ours.detach())
        raise EngineFailed(f"The process that {self._doing} cannot be started.")

    def close(self) -> None:
        """End the process; children that work end by their own clocks."""
        with self._lock:
            self._end()

    def _started(self) -> socket.socket:
        """The socket to the process, begun where there is none; to be called with the lock."""
        if self._control is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    command(self._module),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=variables(),
                )
            with Connection(os.dup(self._control.fileno())) as first:
                first.send(self._first)
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def await_answer(connection: Connection, process_id: int, *, courtesy_s: float, wall_s: float) -> tuple[bytes, bool]:
    """What a child answers, and whether it had to be lowered in priority: it took longer than `courtesy_s`.

    Raises EOFError, OSError where it was ended or does not answer.
    """
    is_courteous = not connection.poll(courtesy_s)
    if is_courteous:
        with suppress(OSError):  # it has ended by now
            os.setpriority(os.PRIO_PROCESS, process_id, COURTEOUS_PRIORITY)
        if not connection.poll(wall_s + GRACE_S):
            raise EOFError
    return connection.recv_bytes(), is_courteous
