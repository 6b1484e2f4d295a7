"""Has kernels written and compiled for this machine, by LLVM in a process of its own where that can be."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from serve_app.core.machine import command, variables
from serve_app.engine.cpu.object_file import Loaded

COMPILER = "serve_app.engine.cpu.compiler"
COMPILING_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a kernel is written for. LLVM divides what the CPU does not do at once.

    width: float32 of a vector;  registers: vectors that the CPU holds
    has_pairs: whether it multiplies pairs of bfloat16 in vectors of that width
    """

    width: int
    registers: int
    has_pairs: bool

    @classmethod
    def here(cls) -> Machine:
        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            return cls(width=16, registers=32, has_pairs=torch.cpu._is_avx512_bf16_supported())
        return cls(width=8, registers=16, has_pairs=False)


class Code(Protocol):
    """Machine code of one module; it lasts as long as this object."""

    def address_of(self, name: str) -> int:
        """Of a function."""


def compiled(emit: Callable[..., Any], **of: bool | int | str) -> Code:
    """Machine code of the module of LLVM's that `emit(**of)` gives; emit: one of `compiler.WRITERS`

    Raises RuntimeError, or OSError.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        from serve_app.engine.cpu.llvm import Jitted

        return Jitted(str(emit(**of)))
    done = subprocess.run(
        command(COMPILER),
        input=json.dumps({"writer": emit.__module__, "of": of}).encode(),
        capture_output=True,
        timeout=COMPILING_S,
        check=False,
        env=variables(),
    )
    if done.returncode:
        raise RuntimeError(f"LLVM ended with {done.returncode}: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return Loaded(done.stdout)
