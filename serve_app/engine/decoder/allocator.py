"""Has the C library keep a step's freed memory for the next step, and give back what loading freed; bounds the kernels
that are kept."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

# <malloc.h> of glibc
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MMAP_THRESHOLD = 32 * 1024 * 1024
"""Bytes; glibc takes no more on 64 bits."""
TRIM_THRESHOLD = MMAP_THRESHOLD
NUM_KERNELS = 32
"""Shapes of products whose kernels oneDNN keeps, and torch beside it: those of some six numbers of rows. Each keeps
1024, and prompts bring new shapes all the time: for 255 numbers of rows, four linears of a model of half a billion
weights had taken 860 MB, and take 40 so. To make one again takes 0.3 ms."""

REST_S = 1.0
WORK_S = 5.0
"""From one time that leftovers are given back to the next, where there is nothing to compute, and where there is."""


def settle_memory() -> None:
    """What libraries keep of memory, for a process that is to compute; before its first product."""
    keep_freed_memory()
    keep_few_kernels()


def keep_freed_memory() -> bool:
    """Let allocations below 32 MiB reuse what was freed, of which 32 MiB may stay at the heap's end; for this process.

    glibc comes to the same bounds by itself, once something so large was freed. Until then each step's activations are
    new pages that the kernel clears: prompts of the demo took 1.2 times as long. Threads that begin later share what
    heaps there are, so that one's freed memory is the next one's: 50 MB less of a replica.

    Returns False where the C library is another and goes on as before.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    options = {M_MMAP_THRESHOLD: MMAP_THRESHOLD, M_TRIM_THRESHOLD: TRIM_THRESHOLD, M_ARENA_MAX: 1}
    return all(bool(set_option(option, value)) for option, value in options.items())


def keep_few_kernels() -> None:
    """For this process, before it computes the first product; what its environment says goes before."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(NUM_KERNELS))


def give_back_freed_memory() -> bool:
    """Let the system have every page in which nothing is any more; for this process.

    Weights that were read in full and are kept in another form leave such pages between those that stay: of a model of
    half a billion parameters in eight bits, 0.8 GB.

    Returns False where there was nothing, or the C library is another.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    return bool(trim(0))


class Leftovers:
    """Gives back what steps have left between what stays: some 140 MB after prompts of many lengths.

    It takes 5 to 10 ms, and the next step that is as large has the kernel clear those pages again; so it is done now
    and then.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds, monotonic"""
        self._clock = clock
        self._last = clock()

    def look(self, *, is_idle: bool) -> bool:
        """To be called after a step; whether it was time.

        is_idle: there is no next one yet
        """
        now = self._clock()
        if now - self._last < (REST_S if is_idle else WORK_S):
            return False
        give_back_freed_memory()
        self._last = self._clock()
        return True


class FilePages:
    """Pages of files that this process has mapped: those that are not needed again need not stay in its memory."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        """ranges: first address and the one behind the last, of each file's mapping"""
        self._ranges = tuple(ranges)

    @classmethod
    def of_this_process(cls, ending: str) -> FilePages:
        """ending: of the files' names. None where the system does not tell of mappings."""
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        starts = [line.split(" ", 1)[0].split("-") for line in lines if line.endswith(ending)]
        return cls([(int(first, 16), int(last, 16)) for first, last in starts])

    def give_back(self, address: int, size: int) -> bool:
        """Drop the whole pages between, which are read from the file again if somebody asks; False where they are no
        file's, and stay as they are.
        """
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end <= begin or not any(first <= begin and end <= last for first, last in self._ranges):
            return False
        madvise = ctypes.CDLL(None).madvise
        return bool(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED) == 0)
