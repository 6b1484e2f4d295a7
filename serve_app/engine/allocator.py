"""Has the C library keep a step's freed memory for the next step, and give back what loading freed."""

from __future__ import annotations

import ctypes

# <malloc.h> of glibc
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD = 32 * 1024 * 1024
"""Bytes; glibc takes no more on 64 bits."""
TRIM_THRESHOLD = 2 * MMAP_THRESHOLD


def keep_freed_memory() -> bool:
    """Let allocations below 32 MiB reuse what was freed, of which 64 MiB may stay at the heap's end; for this process.

    glibc comes to the same bounds by itself, once something so large was freed. Until then each step's activations are
    new pages that the kernel clears: prompts of the demo took 1.2 times as long.

    Returns False where the C library is another and goes on as before.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(set_option(M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(set_option(M_TRIM_THRESHOLD, TRIM_THRESHOLD))


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
