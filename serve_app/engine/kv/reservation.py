"""Address space for keys and values on CPUs; only what is used of it takes memory."""

from __future__ import annotations

import mmap
import sys
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from serve_app.engine.decoder.text_part import ModelNotSupported

PAGE = mmap.PAGESIZE
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
IS_LINUX = sys.platform == "linux"


class Reservation:
    """Address space for a tensor, all zeros; what is never written takes no memory.

    It asks for small pages, as a single position would commit two megabytes of large ones. Raises ModelNotSupported if
    the kernel does not promise so much.
    """

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        try:
            self._memory = mmap.mmap(-1, max(PAGE, -(-num_bytes // PAGE) * PAGE), flags=flags)
        except (OSError, OverflowError) as error:
            raise ModelNotSupported(_unpromised(num_bytes, error)) from error
        if IS_LINUX:
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor over the beginning of the memory, which it keeps alive."""
        return torch.frombuffer(self._memory, dtype=dtype, count=prod(shape)).view(shape)

    def give_back(self, begin: int, end: int) -> None:
        """Zero these bytes and return the memory of all pages that lie wholly within them."""
        first, last = -(-begin // PAGE) * PAGE, end // PAGE * PAGE
        if not IS_LINUX or first >= last:
            self._zero(begin, end)
            return
        self._zero(begin, first)
        self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        self._zero(last, end)

    def _zero(self, begin: int, end: int) -> None:
        if begin < end:
            torch.frombuffer(self._memory, dtype=torch.uint8, count=end - begin, offset=begin).zero_()


def _unpromised(num_bytes: int, error: Exception) -> str:
    try:
        rule = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip()
    except OSError:
        rule = "unknown"
    return (
        f"keys and values want {num_bytes >> 20} MiB of address space at once, and the kernel refuses it ({error};"
        f" vm.overcommit_memory is {rule}, and with 2 the kernel promises no more than there is). Only what is used"
        " takes memory. Lower kv_cache_bytes, or set vm.overcommit_memory to 0."
    )
