"""Calls of kernels one after the other, which all threads of a team carry out together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from serve_app.engine.cpu.emitter import INT64, POINTER, Emitter, Value

NAME = "carry_out"
PARAMETERS = ("counter", "num_calls", "calls", "barrier")
"""Each int64. calls: [num_calls, FIELDS] int64, the address of a kernel in the first field, and its parameters in
those from BEGIN on;  barrier: the address of a function that returns when all threads have called it
"""
FIELDS = 24
BEGIN = 2
"""Behind a kernel's address is the number that its items are counted with."""


def emit() -> Any:
    """The module of LLVM's with the function `NAME` of the parameters' address.

    Each thread takes items of a call until there are none, and waits for the others before the next call.
    """
    module = ir.Module(NAME)
    emitter, given = Emitter.of_function(module, NAME, 1)
    build = emitter.builder
    of = {name: emitter.number(given, at, INT64) for at, name in enumerate(PARAMETERS)}
    kernel = ir.FunctionType(ir.VoidType(), [POINTER])
    wait = build.inttoptr(of["barrier"], ir.FunctionType(ir.VoidType(), []).as_pointer())

    def carry_out(number: Value) -> Sequence[Value]:
        call = emitter.at(build.inttoptr(of["calls"], POINTER), build.mul(number, INT64(FIELDS)), INT64)
        address = build.inttoptr(emitter.number(call, 0, INT64), kernel.as_pointer())
        build.call(address, [emitter.at(call, BEGIN, INT64)])
        build.call(wait, [])
        return ()

    emitter.repeat(INT64(0), of["num_calls"], 1, carry_out)
    build.ret_void()
    return module
