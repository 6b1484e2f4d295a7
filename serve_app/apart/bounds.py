"""What the kernel allows the process that calls these, and those that it forks later."""

from __future__ import annotations

import resource
import signal


def bound_time(*, cpu_s: float, wall_s: float) -> None:
    """The default of both signals is to end the process; no handler of Python's has to run. 0 takes a bound away."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def bound_memory(max_more_bytes: int) -> None:
    """Beside what it has. Linux; a core is never written."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        num_bytes = int(statm.read().split()[0]) * resource.getpagesize() + max_more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
