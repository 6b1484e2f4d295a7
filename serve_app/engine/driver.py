"""The engine's thread and the only place where it meets the rest of the process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

from serve_app.core.delta import Delta, Load
from serve_app.core.errors import EngineFailed
from serve_app.engine.engine import Engine
from serve_app.engine.sequence import Sequence

logger = logging.getLogger(__name__)

STALL_S = 120.0

Deliver = Callable[[list[Delta], Load], None]


class Driver:
    """Steps an engine in a thread of its own for as long as there is work.

    deliver: called in that thread with everything a step gave and with how busy the engine is then; also after a
             step that gave nothing, where an abort changed that
    """

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        self._engine = engine
        self._deliver = deliver
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Items[Items[Sequence]]) -> None:
        """Queue requests, each as its sequences, before the next step."""

        def add() -> None:
            for sequences in requests:
                self._engine.add(sequences)

        self._post(add)

    def abort(self, request_ids: frozenset[str]) -> None:
        """End requests before the next step."""
        self._post(lambda: self._engine.abort(request_ids))

    def check(self) -> None:
        """Raise EngineFailed where the thread is dead or has been in one step for too long."""
        if not self._thread.is_alive():
            raise EngineFailed("the engine's thread is not running")
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > STALL_S:
            raise EngineFailed(f"the engine has been in one step for more than {STALL_S:.0f} s")

    def close(self) -> None:
        """Stop after the current step and wait for the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        while self._wait_for_work():
            had_commands = bool(self._inbox)
            while self._inbox:
                self._inbox.popleft()()
            self._busy_since = time.monotonic()
            deltas = self._engine.step()
            self._busy_since = None
            if deltas or had_commands:
                self._deliver(deltas, self._engine.load)
            if not self._engine.has_work:
                self._engine.check_integrity()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when closing."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._engine.has_work or self._is_closing)
            return not self._is_closing
