"""Memory of a process: the C allocator, huge pages, pages of files, and copies between host and device."""

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
from typing import TypeAlias

import torch
from torch import Tensor

from serve_app.core.machine import MOST, give_way

logger = logging.getLogger(__name__)

# <malloc.h> of glibc
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MMAP_THRESHOLD = 32 * 1024 * 1024
"""Bytes; glibc takes no more on 64 bits."""
TRIM_THRESHOLD = MMAP_THRESHOLD
NUM_KERNELS = 32
"""Shapes of products whose kernels oneDNN and torch keep, for some six numbers of rows. By default each keeps 1024, and
prompts bring new shapes all the time."""

REST_S = 1.0
WORK_S = 5.0
"""From one time that leftovers are given back to the next, where there is nothing to compute, and where there is."""


def settle_memory() -> None:
    """Bound what libraries keep of memory. A process that is to compute calls it before its first product.

    The environment may set other bounds on the kernels that oneDNN and torch keep.
    """
    keep_freed_memory()
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(NUM_KERNELS))


def keep_freed_memory() -> bool:
    """Let allocations below 32 MiB reuse freed memory, and up to 32 MiB stay at the heap's end; for this process.

    glibc comes to the same bounds by itself, once something so large was freed. Until then each step's activations are
    new pages that the kernel clears. Threads that begin later share the heaps that there are.

    Returns False if the C library is not glibc; nothing changes then.
    """
    if (set_option := _of_libc("mallopt")) is None:
        return False
    options = {M_MMAP_THRESHOLD: MMAP_THRESHOLD, M_TRIM_THRESHOLD: TRIM_THRESHOLD, M_ARENA_MAX: 1}
    return all(bool(set_option(option, value)) for option, value in options.items())


def give_back_freed_memory() -> bool:
    """Give the system every page of this process's heap in which nothing is left.

    Weights that were read in full and are kept in another form leave such pages.

    Returns False if there was nothing, or the C library is not glibc.
    """
    trim = _of_libc("malloc_trim")
    return trim is not None and bool(trim(0))


def _of_libc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None if the library is another."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found


class Leftovers:
    """Gives back, now and then, the memory that steps have freed: some 140 MB after prompts of many lengths.

    It takes 5 to 10 ms, and the next large step has the kernel clear those pages again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds, monotonic"""
        self._clock = clock
        self._last = clock()

    def look(self, *, is_idle: bool) -> bool:
        """Call this after a step; it returns whether it was time. is_idle: there is no next step yet"""
        now = self._clock()
        if now - self._last < (REST_S if is_idle else WORK_S):
            return False
        give_back_freed_memory()
        self._last = self._clock()
        return True


class FilePages:
    """Drops pages of mapped files that are not needed again."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        """ranges: of each file's mapping, the first address and the one behind the last"""
        self._ranges = tuple(ranges)

    @classmethod
    def of_this_process(cls, ending: str) -> FilePages:
        """Find the mappings of files with such names; none if the system does not list mappings."""
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
        return _madvise(begin, end - begin, mmap.MADV_DONTNEED) == 0


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
    """Move this process's own memory to huge pages where it fills them already; its contents stay.

    Memory that asked for small pages keeps them. It takes 2 to 3 ms for each MiB; steps go on meanwhile. Nothing
    happens if the system's rule is `never`, if pages have other sizes, or off Linux. A kernel before 6.1 is asked to do
    it by itself later.

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


def lay_in_huge_pages_last(*, is_over: Callable[[], bool]) -> None:
    """Do that in the calling thread, which has the lowest priority from then on; whatever goes wrong is logged."""
    give_way(MOST)
    try:
        lay_in_huge_pages(is_over=is_over)
    except Exception:
        logger.exception("memory stays in small pages")


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
    """Return the ranges of this process's own memory, without those that asked for small pages."""
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


StartHostCopy: TypeAlias = Callable[[Tensor], "HostCopy"]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the host's tensor on the device. The copy is queued behind the device's work; nobody waits for it."""
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # whose block is not given to another before the copy was made
    return tensor.to(device, non_blocking=True)


def send_into(target: Tensor, tensor: Tensor) -> None:
    """Overwrite a tensor of the device by the host's, behind the device's work."""
    if target.device.type == "cuda":
        tensor = tensor.pin_memory()
    target.copy_(tensor, non_blocking=True)


class HostCopy:
    """A device's tensor on its way to the host, queued behind the work that computes it."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """Return the tensor when it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def host_copy_for(device: torch.device) -> StartHostCopy | None:
    """Return what copies a tensor from this device to the host; None for the host itself."""
    return None if device.type == "cpu" else HostCopy
