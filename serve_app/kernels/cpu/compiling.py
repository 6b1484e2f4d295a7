"""Compiles kernels for this machine with LLVM, and calls them in one thread or in torch's OpenMP team."""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from llvmlite import binding as llvm

from serve_app.kernels.openmp import libgomp

logger = logging.getLogger(__name__)

SPEED = 2
"""LLVM's level of optimisation, of three."""
KINDS: Mapping[torch.dtype, Literal["bfloat16", "float16", "float32"]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
"""Numbers that kernels read and write."""
TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 3e-3, torch.float32: 1e-5}
"""By which results of about one may differ from torch's."""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The CPU that a kernel is written for. LLVM divides what it does not do at once.

    width: float32 of a vector;  registers: vectors that the CPU holds
    """

    width: int
    registers: int

    @classmethod
    def here(cls) -> Machine:
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            return cls(width=16, registers=32)
        return cls(width=8, registers=16)


class Kernel:
    """A function that takes the numbers of its items from a counter, whose address is its first parameter.

    Its machine code lasts as long as this object.
    """

    def __init__(self, module: Any, name: str) -> None:
        """Compile a module of llvmlite's, of which that function is. Raises RuntimeError where LLVM refuses it."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.initialize_native_asmparser()
        features = llvm.get_host_cpu_features()
        wide = ",-prefer-256-bit" if features.get("avx512f", False) else ""
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features.flatten() + wide, opt=SPEED, jit=True
        )
        parsed = llvm.parse_assembly(str(module))
        parsed.triple, parsed.data_layout = llvm.get_process_triple(), str(target.target_data)
        parsed.verify()
        builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=SPEED))
        builder.getModulePassManager().run(parsed, builder)
        self._engine = llvm.create_mcjit_compiler(parsed, target)
        self._engine.finalize_object()
        self._address: int = self._engine.get_function_address(name)
        self._alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._address)
        self._together = _team_call()

    def __call__(self, *parameters: int, is_short: bool) -> None:
        """Compute all items.

        parameters: those behind the counter
        is_short: one thread does it sooner than it wakes another; it keeps the interpreter meanwhile
        """
        count = len(parameters) + 1
        given = (ctypes.c_int64 * (count + 1))()  # the last one is the counter
        begin = ctypes.addressof(given)
        given[:count] = [begin + count * ctypes.sizeof(ctypes.c_int64), *parameters]
        if is_short:
            self._alone(begin)
        else:
            self._together(self._address, begin, torch.get_num_threads(), 0)


def tried(what: str, make: Callable[[], Made | None], is_right: Callable[[Made], bool]) -> Made | None:
    """Make kernels and compare them with torch; None, and a warning, where they cannot be made or are wrong."""
    if libgomp() is None:
        return None
    try:
        made = make()
    except (ImportError, RuntimeError, OSError) as error:
        logger.warning("torch computes %s: no kernel could be made (%s)", what, error)
        return None
    with torch.inference_mode():
        if made is None or is_right(made):
            return made
    logger.warning("torch computes %s: the kernel is wrong", what)
    return None


@functools.cache
def _team_call() -> Callable[[int, int, int, int], None]:
    """Return libgomp's own: a function's address, that of its data, how many threads, no flags."""
    library = libgomp()
    assert library is not None
    call = library.GOMP_parallel
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return call


def float_bits(number: float) -> int:
    """Return the bits of a float32."""
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return int(bits)


def address(numbers: torch.Tensor | None) -> int:
    """Return where a tensor begins; 0 for none."""
    return 0 if numbers is None else numbers.data_ptr()
