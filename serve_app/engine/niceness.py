"""Who comes first where cores are short: a proxy, a router or an event loop, which take microseconds, then a step, then
what nobody's next token waits for.

Each thread says so itself, as Linux knows niceness by thread: with five more it has a third of what another one has of
a core, with ten a tenth (sched(7)); and who wakes up beside it does not wait until its turn has ended.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

LONG_WORK = 10
"""Beside a process's steps."""
LEFTOVERS = 19
"""What nothing else wants."""

OWN = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0
"""This process's, before any thread gave way."""

logger = logging.getLogger(__name__)


def give_way(by: int) -> None:
    """Have the calling thread, and all that it starts, be nicer than its process by so much; 19 is the most there is.

    Does nothing beside Linux, where niceness is a process's.
    """
    if sys.platform != "linux" or not by:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(LEFTOVERS, OWN + by))
    except OSError as error:
        logger.debug("a thread's niceness stays as it is: %s", error)
