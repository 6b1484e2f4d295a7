"""This machine: child processes, thread priorities, rare background work, loopback host names.

Linux keeps niceness per thread, and each thread lowers its own (sched(7)). A thread with niceness 5 gets a third of the
CPU time of one with 0; with 10, a tenth. But a nicer thread that already runs is not preempted at once, and the threads
of a step sleep and wake some two hundred times. A SCHED_IDLE thread gives its core away immediately. Measured beside a
thread that tokenizes long texts all the time, a step of 8 sequences of Qwen2.5-0.5B took 1.3 times as long at equal
niceness, 1.25 with niceness 10 and 1.03 with SCHED_IDLE, where the tokenizing took four times as long.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

LONG_WORK = 10
"""Niceness of long background work beside an engine's steps."""
MOST = 19

OWN = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0
"""Niceness of this process at import, before any thread changed its own."""

NEEDS_PYARROW = "Parquet needs pyarrow: .venv/bin/pip install -c constraints.txt -e '.[parquet]'"
"""In words for a person."""

ROOT = Path(__file__).resolve().parents[2]
"""Folder that contains the package."""

SHARE = 0.01
"""Of the time, that throttled work takes at most."""

logger = logging.getLogger(__name__)


def give_way(by: int) -> None:
    """Raise the niceness of the calling thread, and of threads it starts, by `by` above the process's, up to 19.

    Does nothing outside Linux, where niceness belongs to the process.
    """
    if sys.platform != "linux" or not by:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(MOST, OWN + by))
    except OSError as error:
        logger.debug("cannot change the niceness of a thread: %s", error)


def take_leftovers() -> None:
    """Run the calling thread, and threads it starts, only on CPU time that nothing else wants (SCHED_IDLE).

    On a fully busy machine the thread still gets about 0.3 % of a core. It may hold the GIL for long: a step that waits
    for the GIL leaves it a core.
    """
    if sys.platform != "linux":
        return
    try:
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        logger.debug("cannot run a thread at idle priority: %s", error)
        give_way(MOST)


class Throttle:
    """Keeps background work below 1 % of the time: after work of t seconds it waits 99 t."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds, monotonic"""
        self._clock = clock
        self._next = clock()

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Measure the work inside, whether it fails or not."""
        began = self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            self._next = ended + (ended - began) * (1 / SHARE - 1)


def command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module in a new process; start it with `variables()`."""
    return [sys.executable, "-P", "-m", module, *words]


def variables(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child process: `base`, or this process's, with PYTHONPATH set to our module path.

    The working directory is removed from the path, unless the package lies there. Ray puts it first in its workers'
    path, so a file `json.py` there would be imported instead of the library.
    """
    left_out = _working_directory()
    found = [each for each in map(Path, filter(None, sys.path)) if each.resolve() != left_out or left_out == ROOT]
    own = [] if ROOT in found else [ROOT]
    return {**(os.environ if base is None else base), "PYTHONPATH": os.pathsep.join(map(str, [*found, *own]))}


def _working_directory() -> Path | None:
    try:
        return Path.cwd().resolve()
    except FileNotFoundError:  # it was deleted
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host; looks up no name."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
