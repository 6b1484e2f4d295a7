"""Has LLVM make machine code of a module, for the CPU that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm

SPEED = 2
"""LLVM's level of optimisation, of three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a kernel is written for.

    width: float32 of a vector;  registers: vectors that the CPU holds
    """

    name: str
    features: str
    width: int
    registers: int

    @classmethod
    def here(cls) -> Machine:
        features = llvm.get_host_cpu_features()
        if not features.get("avx512f", False):
            return cls(name=llvm.get_host_cpu_name(), features=features.flatten(), width=8, registers=16)
        wide = f"{features.flatten()},-prefer-256-bit"
        return cls(name=llvm.get_host_cpu_name(), features=wide, width=16, registers=32)


class Code:
    """Machine code of one module; it lasts as long as this object."""

    def __init__(self, module: Any, machine: Machine) -> None:
        """Raises RuntimeError where LLVM refuses it."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=machine.name, features=machine.features, opt=SPEED, jit=True
        )
        parsed = llvm.parse_assembly(str(module))
        parsed.triple, parsed.data_layout = llvm.get_process_triple(), str(target.target_data)
        parsed.verify()
        builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=SPEED))
        builder.getModulePassManager().run(parsed, builder)
        self._engine = llvm.create_mcjit_compiler(parsed, target)
        self._engine.finalize_object()

    def address_of(self, name: str) -> int:
        """Of a function."""
        address: int = self._engine.get_function_address(name)
        return address
