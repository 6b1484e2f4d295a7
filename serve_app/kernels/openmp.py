"""Decides whether the threads of a step wait awake or asleep for its next part.

A step is some two hundred parallel regions, or as many barriers in one, and to wake a thread takes 50 to 150
microseconds on a virtual machine: awake, a step takes 0.83 to 0.9 of the time on two cores that nobody else uses, and
twice as long beside a process that uses one of them (`docs/operations.md`). libgomp, which torch brings, reads how long
a thread stays awake once, when it is loaded (`GOMP_SPINCOUNT`); but where a process has more OpenMP threads than there
are CPUs it uses another bound, which is 0 with `OMP_WAIT_POLICY=PASSIVE` (gomp_throttled_spin_count_var in libgomp's
env.c and wait.h).
So a team of threads that do nothing sends all others to sleep, and its end lets them stay awake.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

LOOK_S = 0.5
CROWDED = 0.4
"""Others' work in cores, of those that the threads themselves want, from which these wait asleep: with a quarter
of one of two cores in others' use staying awake took 0.84 to 0.94 of the time, with a half of it 1.07 to 1.15."""
ROOMY = 0.3

CpuTimes = Callable[[], tuple[float, float]]


def cpu_times() -> tuple[float, float]:
    """Return seconds of CPU time: of all processes on the CPUs that this one may use, and of this one."""
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = 0
    with open("/proc/stat") as lines:
        for line in lines:
            name, *fields = line.split()
            if name in allowed:
                user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
                busy += user + nice + system + irq + softirq
    return busy / os.sysconf("SC_CLK_TCK"), time.process_time()


class Team:
    """OpenMP threads of a thread of its own, which do nothing."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads
        self._is_over = threading.Event()
        self._is_there = threading.Event()
        self._thread = threading.Thread(target=self._run, name="team", daemon=True)
        self._thread.start()
        self._is_there.wait()

    def _run(self) -> None:
        harmless = self._library.omp_get_thread_num  # takes nothing; that it is handed a pointer changes nothing
        self._library.GOMP_parallel(harmless, None, ctypes.c_uint(self._num_threads), ctypes.c_uint(0))
        self._is_there.set()
        self._is_over.wait()

    def end(self) -> None:
        """With its thread libgomp ends the team."""
        self._is_over.set()
        self._thread.join()


class Wakefulness:
    """Looks twice a second at what others use of the CPUs, and has this process's threads wait awake or asleep."""

    def __init__(self, times: CpuTimes = cpu_times) -> None:
        self._times = times
        self._library = libgomp()
        self._num_cpus = num_cpus()
        self._num_threads = 1
        self._team: Team | None = None
        self._is_over = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self, num_threads: int) -> None:
        """Begin to look, with threads asleep until there was room; `num_threads` are a step's.

        Nothing begins where there is nothing to choose: for one thread, more than there are CPUs, another library, or
        threads that were told to sleep at once.
        """
        if self._library is None or not 2 <= num_threads <= self._num_cpus:
            return
        if os.environ.get("GOMP_SPINCOUNT", "0") == "0":
            return
        self._num_threads = num_threads
        self.rest(is_crowded=True)
        self._watcher = threading.Thread(target=self._watch, name="wakefulness", daemon=True)
        self._watcher.start()

    @property
    def is_asleep(self) -> bool:
        """Return whether threads sleep at once, whatever `GOMP_SPINCOUNT` says."""
        return self._team is not None

    def rest(self, *, is_crowded: bool) -> None:
        """Have threads wait asleep or awake from now on."""
        if is_crowded and self._team is None and self._library is not None:
            self._team = Team(self._library, self._num_cpus - self._num_threads + 2)  # with the step's, one too many
        elif not is_crowded and self._team is not None:
            self._team.end()
            self._team = None

    def _watch(self) -> None:
        before = (time.monotonic(), *self._times())
        while not self._is_over.wait(LOOK_S):
            now = (time.monotonic(), *self._times())
            elapsed, busy, own = (new - old for new, old in zip(now, before, strict=True))
            before = now
            others = max(0.0, busy - own) / elapsed - (self._num_cpus - self._num_threads)
            if others > CROWDED or others < ROOMY:
                self.rest(is_crowded=others > CROWDED)

    def close(self) -> None:
        """Leave nothing running."""
        self._is_over.set()
        if self._watcher is not None:
            self._watcher.join()
        self.rest(is_crowded=False)


def compute_alone() -> None:
    """Have the calling thread compute without a team from now on, which would count among the process's threads."""
    torch.get_num_threads()  # a thread takes over the process's number when it first asks
    library = libgomp()
    if library is not None:
        library.omp_set_num_threads(1)


@contextmanager
def alone() -> Iterator[None]:
    """Let the calling thread compute without a team; other threads are not told."""
    library = libgomp()
    if library is None:
        yield
        return
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(1)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)


def num_cpus() -> int:
    """Return how many CPUs this process may use; 0 if the system does not tell."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0


def libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that torch is linked to; None if there is none, or off Linux."""
    if sys.platform != "linux":
        return None
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        try:
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
        except OSError:
            logger.debug("%s is not in use", path.name)
    return None
