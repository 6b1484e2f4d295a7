"""How kernels are called: with the address of their parameters, by one thread or by torch's own team."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from serve_app.engine.cpu.compiling import Code
from serve_app.engine.decoder.openmp import libgomp

KINDS: Mapping[torch.dtype, Literal["bfloat16", "float16", "float32"]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
"""Numbers that kernels read and write."""


class Kernel:
    """A function that takes the numbers of its items from a counter, whose address is its first parameter."""

    def __init__(self, code: Code, name: str) -> None:
        self._code = code  # lasts as long as this
        self._address = code.address_of(name)
        self._alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._address)
        self._together = _team_call()

    @property
    def address(self) -> int:
        """Of the function; valid as long as this is there."""
        return self._address

    def __call__(self, *parameters: int, is_short: bool, num_threads: int | None = None) -> None:
        """parameters: behind the counter
        is_short: one thread does it sooner than it wakes another; it keeps the interpreter meanwhile
        num_threads: torch's number if none is said
        """
        count = len(parameters) + 1
        given = (ctypes.c_int64 * (count + 1))()  # the last one is the counter
        begin = ctypes.addressof(given)
        given[:count] = [begin + count * ctypes.sizeof(ctypes.c_int64), *parameters]
        if is_short:
            self._alone(begin)
        else:
            self._together(self._address, begin, num_threads or torch.get_num_threads(), 0)


@functools.cache
def _team_call() -> Callable[[int, int, int, int], None]:
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
