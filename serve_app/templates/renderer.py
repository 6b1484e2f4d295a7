"""Has conversations rendered in a process apart, which a hostile template may take as long as it is allowed to."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from serve_app.core.errors import EngineFailed
from serve_app.core.prompt import Conversation, Rendering
from serve_app.sandbox.fork_server import ForkServer, await_answer
from serve_app.templates.render_process import COME, prepare
from serve_app.templates.rendering import Refused, Work

BEGIN_S = 10.0
"""For which a child is waited for that nobody needs yet."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Child:
    """A process that renders for whoever holds its connection.

    is_courteous: it runs at lower priority, and so is not used again
    """

    connection: Connection
    process_id: int = 0
    is_courteous: bool = False


class Renderer:
    """Of one template. Threads may share it. The process begins beforehand or with the first rendering, and again where
    it was lost.

    A child that has rendered in time is kept for the next conversation; one that has not is gone.
    """

    def __init__(self, work: Work) -> None:
        self._limits = work.limits
        self._server = ForkServer(prepare, work, doing="renders chat templates")
        self._lock = threading.Lock()
        self._idle: list[_Child] = []

    @property
    def num_idle(self) -> int:
        """Children that wait for something to render."""
        return len(self._idle)

    def begin(self) -> None:
        """Begin the process, and have a child wait for the first conversation. Raises EngineFailed."""
        if self.num_idle:
            return
        child = _Child(connection=self._server.open())
        child.connection.poll(BEGIN_S)
        with self._lock:
            self._idle.append(child)

    def render(self, conversation: Conversation) -> Rendering:
        """Blocks for `max_wall_s` at most, and for the process to begin. Raises Refused, EngineFailed."""
        answer = self._answered({"source": conversation.source, "continues_last": conversation.continues_last})
        return Rendering(text=answer["text"], foreign=tuple(answer["foreign"]))

    def shows_tools(self) -> bool:
        """Whether the template writes tools; True where nothing can be rendered. Blocks. Raises EngineFailed."""
        try:
            return bool(self._answered({"source": None})["shows_tools"])
        except Refused:
            return True

    def _answered(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Raises Refused, EngineFailed."""
        child = self._taken(json.dumps(job, ensure_ascii=False).encode())
        try:
            answer = self._answer(child)
        except (EOFError, OSError):
            child.connection.close()
            logger.info("a conversation of %d characters was not rendered in time", len(job["source"] or ""))
            raise Refused("it takes too much time or memory to render") from None
        if child.is_courteous:
            child.connection.close()
        else:
            with self._lock:
                self._idle.append(child)
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    def close(self) -> None:
        """End the process; renderings that run end with it or by their own clocks."""
        self._server.close()
        while (child := self._idle_child()) is not None:
            child.connection.close()

    def _taken(self, job: bytes) -> _Child:
        """A child that has the job, an idle one if there is any. Raises EngineFailed where no child took it."""
        while (idle := self._idle_child()) is not None:
            if _hands_over(idle, job):
                return idle
        child = _Child(connection=self._server.open())
        if not _hands_over(child, job):  # nothing of the conversation was looked at
            raise EngineFailed("The process that renders chat templates ended before it began.")
        return child

    def _idle_child(self) -> _Child | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _answer(self, child: _Child) -> dict[str, Any]:
        """Raises EOFError or OSError where the child was ended."""
        limits = self._limits
        told, child.is_courteous = await_answer(
            child.connection, child.process_id, courtesy_s=limits.courtesy_s, wall_s=limits.max_wall_s
        )
        answer: dict[str, Any] = json.loads(told)
        return answer


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
