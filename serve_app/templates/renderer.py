"""Has conversations rendered in a process apart, which a hostile template may take as long as it is allowed to."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from serve_app.core.conversation import Conversation, Rendering
from serve_app.core.errors import EngineFailed
from serve_app.templates.render_process import COME, Refused, Work

logger = logging.getLogger(__name__)

COURTEOUS_PRIORITY = 10
GRACE_S = 0.3


@dataclass(slots=True)
class _Child:
    """A process that renders for whoever holds its connection.

    is_courteous: it runs at lower priority, and so is not used again
    """

    connection: Connection
    process_id: int = 0
    is_courteous: bool = False


class Renderer:
    """Of one template. Threads may share it. The process begins with the first rendering, or where it was lost.

    A child that has rendered in time is kept for the next conversation; one that has not is gone.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def num_idle(self) -> int:
        """Children that wait for something to render."""
        return len(self._idle)

    def render(self, conversation: Conversation) -> Rendering:
        """Blocks for `max_wall_s` at most, and for the process to begin. Raises Refused, EngineFailed."""
        job = {"source": conversation.source, "continues_last": conversation.continues_last}
        child = self._taken(json.dumps(job, ensure_ascii=False).encode())
        try:
            answer = self._answer(child)
        except (EOFError, OSError):
            child.connection.close()
            logger.info("a conversation of %d characters was not rendered in time", len(conversation.source))
            raise Refused("it takes too much time or memory to render") from None
        if child.is_courteous:
            child.connection.close()
        else:
            with self._lock:
                self._idle.append(child)
        if "refused" in answer:
            raise Refused(answer["refused"])
        return Rendering(text=answer["text"], foreign=tuple(answer["foreign"]))

    def close(self) -> None:
        """End the process; renderings that run end with it or by their own clocks."""
        with self._lock:
            self._end()
        while (child := self._idle_child()) is not None:
            child.connection.close()

    def _taken(self, job: bytes) -> _Child:
        """A child that has the job, an idle one if there is any. Raises EngineFailed where no child took it."""
        while (idle := self._idle_child()) is not None:
            if _hands_over(idle, job):
                return idle
        child = _Child(connection=self._open())
        if not _hands_over(child, job):  # nothing of the conversation was looked at
            raise EngineFailed("The process that renders chat templates ended before it began.")
        return child

    def _idle_child(self) -> _Child | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _open(self) -> Connection:
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
        raise EngineFailed("The process that renders chat templates cannot be started.")

    def _answer(self, child: _Child) -> dict[str, Any]:
        """Raises EOFError or OSError where the child was ended."""
        connection = child.connection
        if not connection.poll(self._work.limits.courtesy_s):
            child.is_courteous = True
            with suppress(OSError):  # it has ended by now
                os.setpriority(os.PRIO_PROCESS, child.process_id, COURTEOUS_PRIORITY)
            if not connection.poll(self._work.limits.max_wall_s + GRACE_S):
                raise EOFError
        answer: dict[str, Any] = json.loads(connection.recv_bytes())
        return answer

    def _started(self) -> socket.socket:
        """The socket to the process, begun where there is none; to be called with the lock."""
        if self._control is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "serve_app.templates.render_process"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            with Connection(os.dup(self._control.fileno())) as first:
                first.send(self._work)
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def _hands_over(child: _Child, job: bytes) -> bool:
    """Whether the child has taken the job; one that has not is done with."""
    try:
        child.process_id = int(child.connection.recv_bytes())  # after the process has begun
        child.connection.send_bytes(job)
        assert child.connection.recv_bytes() == COME
    except (EOFError, OSError):
        child.connection.close()
        return False
    return True
