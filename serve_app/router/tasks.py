"""Begins work that outlives whoever asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

Result = TypeVar("Result")


def begin(work: Coroutine[Any, Any, Result], tasks: set[Any] | None = None) -> asyncio.Task[Result]:
    """Begin in an empty context: Serve cancels the calls of a client's request.

    tasks: keep the task until it has ended; None leaves that to the caller
    """
    task = asyncio.get_running_loop().create_task(work, context=Context())
    if tasks is not None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task
