"""Starts the sandbox's process when it is first needed, and connects its clients to fresh children."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from serve_app.core.errors import EngineFailed
from serve_app.core.machine import command, variables
from serve_app.sandbox.child import COME, Work

First = TypeVar("First")

SLOW_NICENESS = 10
GRACE_S = 0.3
"""Waited for beyond a child's own time bound."""


@dataclass(slots=True)
class Child:
    """A process that works for the holder of its connection.

    is_slow: it runs at lower priority
    """

    connection: Connection
    process_id: int = 0
    is_slow: bool = False

    def take(self, job: bytes) -> bool:
        """Return whether the child has taken the job; else nothing of that was looked at, and the connection is closed.

        Blocks until its process has begun.
        """
        try:
            self.process_id = int(self.connection.recv_bytes())
            self.connection.send_bytes(job)
            assert self.connection.recv_bytes() == COME
        except (EOFError, OSError):
            self.connection.close()
            return False
        return True

    def answer(self, *, slow_after_s: float, wall_s: float) -> dict[str, Any]:
        """Return the child's answer; it runs at lower priority if it takes longer than `slow_after_s`.

        Raises EOFError or OSError if the child was ended or does not answer.
        """
        self.is_slow = not self.connection.poll(slow_after_s)
        if self.is_slow:
            with suppress(OSError):  # it has ended by now
                os.setpriority(os.PRIO_PROCESS, self.process_id, SLOW_NICENESS)
            if not self.connection.poll(wall_s + GRACE_S):
                raise EOFError
        answer: dict[str, Any] = json.loads(self.connection.recv_bytes())
        return answer


class ForkServer:
    """The client side of one sandbox process. Threads may share it; a lost process is started again.

    prepare: a module-level function that runs in the process, from `first` to what each child does; both are pickled
    doing:   what the process does, for messages
    """

    def __init__(self, prepare: Callable[[First], Work], first: First, *, doing: str) -> None:
        self._job = prepare, first
        self._doing = doing
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> Child:
        """Return a fresh child, which is given its job by `take`. Raises EngineFailed."""
        for _ in range(2):
            ours, theirs = socket.socketpair()
            with theirs, self._lock:
                try:
                    socket.send_fds(self._started(), [b"t"], [theirs.fileno()])
                except OSError:
                    ours.close()
                    self._end()
                    continue
            return Child(Connection(ours.detach()))
        raise EngineFailed(f"The process that {self._doing} cannot be started.")

    def close(self) -> None:
        """End the process; running children end by their own time bounds."""
        with self._lock:
            self._end()

    def _started(self) -> socket.socket:
        """Return the socket to the process, started if there is none. Call with the lock held."""
        if self._control is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    command("serve_app.sandbox.child"),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=variables(),
                )
            with Connection(os.dup(self._control.fileno())) as first:
                first.send(self._job)
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None
