"""Has conversations rendered in the sandbox, by children that are reused while they answer in time."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from serve_app.core.errors import EngineFailed, InvalidRequest, Overloaded
from serve_app.core.prompt import Conversation, Rendering
from serve_app.sandbox.fork_server import Child, ForkServer
from serve_app.templates.rendering import Refused, Work, prepare


class ChatTemplate:
    """Renders, from one event loop, in threads that wait for the sandbox. Short chats never wait for long ones."""

    def __init__(self, work: Work, *, model_name: str) -> None:
        self._has_template = bool(work.template or work.tool_template)
        self._model_name = model_name
        self._limits = limits = work.limits
        self._renderer = Renderer(work)
        self._pools = [
            ThreadPoolExecutor(num_threads, thread_name_prefix=f"template-{name}")
            for name, num_threads in zip(("short", "long"), limits.max_renderings, strict=True)
        ]
        self._num_waiting = 0

    async def warm(self) -> None:
        """Do beforehand what the first conversation would wait for: the process, and the template in it."""
        if self._has_template:
            await asyncio.get_running_loop().run_in_executor(self._pools[0], self._renderer.begin)

    def shows_tools(self) -> bool:
        """Return whether the template writes the tools it is given; True also if that cannot be found out. Blocks."""
        return not self._has_template or self._renderer.shows_tools()

    async def render(self, conversation: Conversation) -> Rendering:
        """Render a conversation. Raises InvalidRequest if that fails, Overloaded if too many wait."""
        if not self._has_template:
            raise without_template(conversation.name, self._model_name)
        if self._num_waiting >= self._limits.max_waiting:
            raise Overloaded(
                f"More than {self._limits.max_waiting} chats wait to be rendered.", None, {"retry_after_s": 1}
            )
        pool = self._pools[len(conversation.source) > self._limits.short_chars]
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                pool, copy_context().run, self._renderer.render, conversation
            )
        except Refused as refused:
            must = f"be what the chat template of {self._model_name} takes"
            raise InvalidRequest.refusing(conversation.name, must=must, found=f"that {refused}") from refused
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the threads and the process."""
        self._renderer.close()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


def without_template(name: str, model_name: str) -> InvalidRequest:
    """Return the refusal of a conversation with a model that has no template."""
    return InvalidRequest.refusing(
        name,
        must="be sent to a model that has a chat template",
        found=f"that {model_name} has none",
        remedy=(
            "Whoever runs the service gives it one by `chat_template` in the `args` of its application; without one,"
            " send a `prompt` to /v1/completions."
        ),
    )


BEGIN_S = 10.0
"""Waited for the first child, before any conversation needs it."""

logger = logging.getLogger(__name__)


class Renderer:
    """Of one template. Threads may share it. The process begins beforehand or with the first rendering, and again where
    it was lost.

    A child that has rendered in time is kept for the next conversation; one that has not is gone.
    """

    def __init__(self, work: Work) -> None:
        self._limits = work.limits
        self._server = ForkServer(prepare, work, doing="renders chat templates")
        self._lock = threading.Lock()
        self._idle: list[Child] = []

    @property
    def num_idle(self) -> int:
        """Children that wait for something to render."""
        return len(self._idle)

    def begin(self) -> None:
        """Begin the process, and have a child wait for the first conversation. Raises EngineFailed."""
        if self.num_idle:
            return
        child = self._server.open()
        child.connection.poll(BEGIN_S)
        with self._lock:
            self._idle.append(child)

    def render(self, conversation: Conversation) -> Rendering:
        """Blocks for `max_wall_s` at most, and for the process to begin. Raises Refused, EngineFailed."""
        answer = self._answered({"source": conversation.source, "continues_last": conversation.continues_last})
        return Rendering(text=answer["text"], foreign=tuple(answer["foreign"]))

    def shows_tools(self) -> bool:
        """Return whether the template writes tools; True if nothing can be rendered. Blocks. Raises EngineFailed."""
        try:
            return bool(self._answered({"source": None})["shows_tools"])
        except Refused:
            return True

    def _answered(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return a child's answer to a job. Raises Refused, EngineFailed."""
        child = self._taken(json.dumps(job, ensure_ascii=False).encode())
        try:
            answer = child.answer(slow_after_s=self._limits.slow_after_s, wall_s=self._limits.max_wall_s)
        except (EOFError, OSError):
            child.connection.close()
            logger.info("a conversation of %d characters was not rendered in time", len(job["source"] or ""))
            raise Refused("it takes too much time or memory to render") from None
        if child.is_slow:
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

    def _taken(self, job: bytes) -> Child:
        """Return a child that has the job, an idle one if there is any. Raises EngineFailed if no child took it."""
        while (idle := self._idle_child()) is not None:
            if idle.take(job):
                return idle
        child = self._server.open()
        if not child.take(job):  # nothing of the conversation was looked at
            raise EngineFailed("The process that renders chat templates ended before it began.")
        return child

    def _idle_child(self) -> Child | None:
        with self._lock:
            return self._idle.pop() if self._idle else None
