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
from multiprocessing.connection import Connection
from typing import Any

from serve_app.core.conversation import Conversation, Rendering
from serve_app.core.errors import EngineFailed
from serve_app.templates.render_process import Refused, Work

logger = logging.getLogger(__name__)

COURTEOUS_PRIORITY = 10
GRACE_S = 0.3


class Renderer:
    """Of one template. Threads may share it. The process begins with the first rendering, or where it was lost."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, conversation: Conversation) -> Rendering:
        """Blocks for `max_wall_s` at most, and for the process to begin. Raises Refused, EngineFailed."""
        with self._open() as connection:
            try:
                answer = self._ask(connection, conversation)
            except (EOFError, OSError):
                logger.info("a conversation of %d characters was not rendered in time", len(conversation.source))
                raise Refused("it takes too much time or memory to render") from None
        if "refused" in answer:
            raise Refused(answer["refused"])
        return Rendering(text=answer["text"], foreign=tuple(answer["foreign"]))

    def close(self) -> None:
        """End the process; renderings that run end with it or by their own clocks."""
        with self._lock:
            self._end()

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

    def _ask(self, connection: Connection, conversation: Conversation) -> dict[str, Any]:
        """Raises EngineFailed where no child began, EOFError or OSError where it was ended."""
        try:
            process_id = int(connection.recv_bytes())  # after the process has begun
        except (EOFError, OSError) as error:  # nothing of the conversation was looked at
            raise EngineFailed("The process that renders chat templates ended before it began.") from error
        job = {"source": conversation.source, "continues_last": conversation.continues_last}
        connection.send_bytes(json.dumps(job, ensure_ascii=False).encode())
        if not connection.poll(self._work.limits.courtesy_s):
            with suppress(OSError):  # it has ended by now
                os.setpriority(os.PRIO_PROCESS, process_id, COURTEOUS_PRIORITY)
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
