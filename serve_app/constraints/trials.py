"""Has constraints tried in a process apart, which a hostile one may take as long as it is allowed to and no longer."""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from serve_app.constraints.compilation import Grammar
from serve_app.constraints.limits import ConstraintLimits
from serve_app.constraints.refusal import Refusal
from serve_app.constraints.trial_process import receive, send
from serve_app.constraints.vocabulary import Vocabulary
from serve_app.core.constraint import Constraint
from serve_app.core.errors import EngineFailed

logger = logging.getLogger(__name__)

COURTEOUS_PRIORITY = 10
GRACE_S = 0.3


class OutOfTime(Refusal):
    """The trial was ended by the clock, which a busy machine may be to blame for: it may be tried again."""


class Trials:
    """Threads may share it. The process begins with the first trial, and again where it was lost."""

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Begin the process, so that the first trial does not wait for it. Raises EngineFailed."""
        self._open().close()

    def run(self, constraint: Constraint, *, max_wall_s: float | None = None) -> Grammar:
        """Blocks for so long at most, `max_wall_s` of the limits unless it is said, and for the process to begin.

        Raises Refusal, EngineFailed.
        """
        wall_s = self._limits.max_wall_s if max_wall_s is None else max_wall_s
        connection = self._open()
        with connection:
            started = time.monotonic()
            try:
                answer = self._ask(connection, constraint, wall_s)
            except (EOFError, OSError) as error:
                seconds = time.monotonic() - started
                raise self._ended(constraint, seconds, wall_s) from error
        if "refused" in answer:
            raise Refusal(str(answer["refused"]), str(answer["path"]))
        return Grammar(text=answer["grammar"], formats=tuple(answer["formats"]))

    def close(self) -> None:
        """End the process; trials that run end with it or by their own clocks."""
        with self._lock:
            self._end()

    def _open(self) -> socket.socket:
        """A connection to a fresh child. Raises EngineFailed."""
        for is_last in (False, True):
            ours, theirs = socket.socketpair()
            with theirs, self._lock:
                try:
                    socket.send_fds(self._started(), [b"t"], [theirs.fileno()])
                except OSError:
                    self._end()
                    if is_last:
                        break
                    continue
            return ours
        raise EngineFailed("The process that tries constraints cannot be started.")

    def _ask(self, connection: socket.socket, constraint: Constraint, wall_s: float) -> dict[str, Any]:
        """Raises EngineFailed where no child began, EOFError where it was ended, TimeoutError (an OSError) where even
        that does not come.
        """
        connection.settimeout(None)
        try:
            process_id = int(receive(connection))  # after the process has begun
        except (EOFError, OSError) as error:  # nothing of the constraint was looked at
            raise EngineFailed("The process that tries constraints ended before it began with this one.") from error
        connection.settimeout(wall_s + GRACE_S)
        job = {"kind": constraint.kind, "source": constraint.source, "wall_s": wall_s}
        send(connection, json.dumps(job).encode())
        if not select.select([connection], [], [], self._limits.courtesy_s)[0]:
            with suppress(OSError):  # it has ended by now
                os.setpriority(os.PRIO_PROCESS, process_id, COURTEOUS_PRIORITY)
        answer: dict[str, Any] = json.loads(receive(connection))
        return answer

    def _ended(self, constraint: Constraint, seconds: float, wall_s: float) -> Refusal:
        logger.info(
            "a %s of %d characters was not compiled in %.2f s", constraint.kind, len(constraint.source), seconds
        )
        if seconds >= wall_s * 0.95:
            return OutOfTime("it takes too long to compile")
        return Refusal("it takes too much time or memory to compile")

    def _started(self) -> socket.socket:
        """The socket to the process, begun where there is none; to be called with the lock."""
        if self._control is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._control, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "serve_app.constraints.trial_process"]
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            send(self._control, pickle.dumps((self._vocabulary, self._limits)))
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None
