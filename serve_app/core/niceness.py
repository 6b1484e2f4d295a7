"""Who comes first where cores are short: a proxy, a router or an event loop, which take microseconds, then a step, then
what nobody's next token waits for.

Each thread says so itself, as Linux knows niceness by thread: with five more it has a third of what another one has of
a core, with ten a tenth (sched(7)); and who wakes up beside it does not wait until its turn has ended. Beside a step
that is little: its threads sleep and wake some two hundred times, and whoever is there when they wake goes on for
milliseconds. A thread that takes leftovers (SCHED_IDLE) does not. Beside one that cuts long texts into tokens all the
time a step of 8 sequences of Qwen2.5-0.5B took 1.3 times as long as alone where both were equal, 1.25 with ten more,
and 1.03 beside leftovers, of which the text took four times as long (median; 1.65, 1.65 and 1.1 for one step of ten).
"""

from __future__ import annotations

import logging
import os
import sys
import threading

LONG_WORK = 10
"""Beside a process's steps."""
MOST = 19

OWN = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0
"""This process's, before any thread gave way."""

logger = logging.getLogger(__name__)


def give_way(by: int) -> None:
    """Have the calling thread, and all that it starts, be nicer than its process by so much, of 19 at most.

    Does nothing beside Linux, where niceness is a process's.
    """
    if sys.platform != "linux" or not by:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(MOST, OWN + by))
    except OSError as error:
        logger.debug("a thread's niceness stays as it is: %s", error)


def take_leftovers() -> None:
    """Have the calling thread, and all that it starts, compute where nothing else would, or a little.

    For what may take long: beside processes that leave nothing it has a three-hundredth of a core (sched(7)). It may
    hold Python's lock as long as it likes: the step that waits for that lock leaves it a core.
    """
    if sys.platform != "linux":
        return
    try:
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        logger.debug("a thread computes beside all others: %s", error)
        give_way(MOST)
