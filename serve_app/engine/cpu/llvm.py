"""Has LLVM make machine code for the CPU that it runs on.

It takes 75 MB of a process's memory and never gives them back, so no process that serves has it where it can load what
another has made (`compiler.py`).
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm

SPEED = 2
"""LLVM's level of optimisation, of three."""


def object_file(instructions: str) -> bytes:
    """Machine code of a module in LLVM's text form. Raises RuntimeError where LLVM refuses it."""
    module, target = _optimised(instructions, reloc="pic", codemodel="small")
    code: bytes = target.emit_object(module)
    return code


class Jitted:
    """Machine code of a module in this process; it lasts as long as this object."""

    def __init__(self, instructions: str) -> None:
        """Raises RuntimeError where LLVM refuses them."""
        module, target = _optimised(instructions, jit=True)
        self._engine = llvm.create_mcjit_compiler(module, target)
        self._engine.finalize_object()

    def address_of(self, name: str) -> int:
        """Of a function."""
        address: int = self._engine.get_function_address(name)
        return address


def _optimised(instructions: str, **options: Any) -> tuple[Any, Any]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    features = llvm.get_host_cpu_features()
    wide = ",-prefer-256-bit" if features.get("avx512f", False) else ""
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten() + wide, opt=SPEED, **options
    )
    module = llvm.parse_assembly(instructions)
    module.triple, module.data_layout = llvm.get_process_triple(), str(target.target_data)
    module.verify()
    builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=SPEED))
    builder.getModulePassManager().run(module, builder)
    return module, target
