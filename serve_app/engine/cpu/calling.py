"""How kernels are called: with the address of their parameters, by one thread or by torch's own team."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from serve_app.engine.openmp import libgomp

KINDS: Mapping[torch.dtype, Literal["bfloat16", "float16", "float32"]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
"""Numbers that kernels read and write."""


@functools.cache
def team_call() -> Callable[[int, int, int, int], None]:
    """libgomp's own: a function's address, that of its data, how many threads, no flags."""
    library = libgomp()
    assert library is not None
    call = library.GOMP_parallel
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return call


def float_bits(number: float) -> int:
    """Of a float32."""
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return int(bits)
