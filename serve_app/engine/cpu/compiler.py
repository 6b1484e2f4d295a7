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

WRITERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        each.__name__: each.emit
        for each in (
            attention_kernel,
            likeliest_kernel,
            low_rank_kernel,
            product_kernel,
            sequence_kernel,
            token_kernels,
            vocabulary_kernel,
        )
    }
)
"""By their modules' names."""

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    sys.stdout.buffer.write(object_file(str(WRITERS[asked["writer"]](**asked["of"]))))
