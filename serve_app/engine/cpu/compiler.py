"""The process that writes and compiles kernels: it reads in JSON which one and of what, and writes an object file.

A kernel's instructions are up to 370 000 objects and LLVM takes 75 MB: neither stays with who asks (`compiling.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from serve_app.engine.cpu import (
    attention_kernel,
    likeliest_kernel,
    low_rank_kernel,
    product_kernel,
    sequence_kernel,
    token_kernels,
    vocabulary_kernel,
)
from serve_app.engine.cpu.llvm import object_file


def as_written(*, instructions: str) -> str:
    """A module in LLVM's text form, of whoever writes it by hand."""
    return instructions


WRITERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        f"{each.__module__}.{each.__name__}": each
        for each in (
            attention_kernel.emit,
            likeliest_kernel.emit,
            low_rank_kernel.emit,
            product_kernel.emit,
            sequence_kernel.emit,
            token_kernels.emit,
            vocabulary_kernel.emit,
        )
    }
    | {"as_written": as_written}
)

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    sys.stdout.buffer.write(object_file(str(WRITERS[asked["writer"]](**asked["of"]))))
