"""Has the kernel lay what stays in memory in huge pages: a step, which reads all weights, looks up fewer addresses."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import re
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

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
