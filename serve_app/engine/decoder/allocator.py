"""Tunes the C allocator: keeps memory freed by a step for the next one, returns what loading freed, sets huge pages."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

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
        """Drop the whole pages in this range. Return False, and change nothing, if they are not pages of a file.

        If somebody reads them again, they come from the file.
        """
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end <= begin or not any(first <= begin and end <= last for first, last in self._ranges):
            return False
        madvise = ctypes.CDLL(None).madvise
        return bool(madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED) == 0)


MADV_COLLAPSE = 25
"""Of Linux 6.1: now, and whatever size the pages have by now."""
SMALL = 4096
HUGE = 2 << 20
"""Bytes of a huge page, on x86-64 and on arm64 with pages of 4 KiB."""
AT_ONCE = 8
"""Huge pages that one call lays; it takes some 20 ms, and a step that wants memory meanwhile waits for one of them."""
ENTRY = 8
"""Bytes that say of a page whether it is there; it is where the highest bit is set."""
TOLD = HUGE // SMALL * ENTRY
"""Bytes of those of a huge page."""
RULE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
AREAS = Path("/proc/self/smaps")
PAGES = Path("/proc/self/pagemap")

Advise = Callable[[int, int, int], int]
"""madvise of an address, a size and an advice: the number of the error, or 0."""


def lay_in_huge_pages(*, is_over: Callable[[], bool] = lambda: False, advise: Advise | None = None) -> int:
    """What of this process's own memory fills huge pages as it is; nothing is added to it, and what is there stays.

    Memory of which it was said that it is to have small pages keeps them. Takes 2 to 3 ms for each MiB; steps go on
    meanwhile. Does nothing where the system's rule is `never`, where pages have other sizes, or off Linux; on a kernel
    before 6.1 the kernel is asked to do it by and by.

    (The 0.5B in bfloat16, two cores with AVX-512, in turns with one in small pages: steps of one sequence are 1.23
    times as fast, of 8 and 16 1.14, of 32 1.09, a prompt of 512 1.01.)

    is_over: asked between two calls;  returns the bytes that were laid, or are to be
    """
    began, count, advice, tell = time.monotonic(), 0, MADV_COLLAPSE, advise or _madvise
    for at, size in _pieces() if _is_allowed() else ():
        if is_over():
            break
        error = tell(at, size, advice)
        if error == errno.EINVAL and not count:
            advice = mmap.MADV_HUGEPAGE
            error = tell(at, size, advice)
        count += 0 if error else size  # else there is no room in one piece, or the memory has gone meanwhile
    if count:
        how = "lie" if advice == MADV_COLLAPSE else "are to lie by and by"
        logger.info("%d MiB of memory %s in huge pages after %.1f s", count >> 20, how, time.monotonic() - began)
    return count


def _is_allowed() -> bool:
    try:
        return mmap.PAGESIZE == SMALL and "[never]" not in RULE.read_text(encoding="ascii")
    except OSError:
        return False


def _pieces() -> Iterator[tuple[int, int]]:
    """Address and size of a few huge pages each, of which every small page is there."""
    with PAGES.open("rb", buffering=0) as pages:
        for first, last in _areas():
            begin, end = -(-first // HUGE) * HUGE, last // HUGE * HUGE
            for at in range(begin, end, AT_ONCE * HUGE):
                pages.seek(at // SMALL * ENTRY)
                told = pages.read(min(AT_ONCE * HUGE, end - at) // SMALL * ENTRY)
                are_there = [_are_there(told[of : of + TOLD]) for of in range(0, len(told) // TOLD * TOLD, TOLD)]
                for is_there, run in groupby(range(len(are_there)), key=are_there.__getitem__):
                    places = list(run)
                    if is_there:
                        yield at + places[0] * HUGE, len(places) * HUGE


def _are_there(entries: bytes) -> bool:
    return bool((torch.frombuffer(bytearray(entries), dtype=torch.int64) < 0).all())


def _areas() -> list[tuple[int, int]]:
    """From where to where this process's own memory lies, of no file, of which nobody said that its pages be small."""
    found: list[tuple[int, int]] = []
    area: tuple[int, int] | None = None
    for line in AREAS.read_text(encoding="utf-8", errors="replace").splitlines():
        if head := re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\[heap\]|)", line):
            area = int(head[1], 16), int(head[2], 16)
        elif line.startswith("VmFlags:"):
            if area is not None and "nh" not in line.split():
                found.append(area)
            area = None
    return found


def _madvise(address: int, size: int, advice: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if failed else 0
