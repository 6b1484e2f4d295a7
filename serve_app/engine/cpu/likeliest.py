"""The likeliest tokens of rows of bfloat16 by a kernel of our own, where this machine has it."""

from __future__ import annotations

import functools
import logging
import subprocess

import torch
from torch import Tensor

from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.calling import Kernel
from serve_app.engine.decoder.openmp import libgomp

logger = logging.getLogger(__name__)

SHORT = 1 << 20
"""Numbers that one thread passes in the time that it takes to wake another: a tenth of a millisecond."""


class Likeliest:
    """Of rows in the host's memory."""

    def __init__(self, code: compiling.Code, name: str) -> None:
        self._kernel = Kernel(code, name)

    @staticmethod
    def takes(logits: Tensor) -> bool:
        """Whether these can be read."""
        is_here = logits.device.type == "cpu" and logits.dtype == torch.bfloat16
        return is_here and logits.dim() == 2 and logits.stride(1) == 1 and logits.shape[1] > 0

    def __call__(self, logits: Tensor) -> Tensor:
        """As torch.argmax: the first of the largest, or the first that is no number; [rows, vocab] -> [rows] int64"""
        rows, vocab = logits.shape
        found = torch.empty(rows, dtype=torch.int64)
        given = (rows, logits.data_ptr(), logits.stride(0), vocab, found.data_ptr())
        self._kernel(*given, is_short=rows == 1 or rows * vocab <= SHORT)
        return found


@functools.cache
def likeliest_kernel() -> Likeliest | None:
    """None where this machine has none. It is tried beside torch first."""
    if libgomp() is None:
        return None
    try:
        from serve_app.engine.cpu import likeliest_kernel as of

        found = Likeliest(compiling.compiled(of.emit, width=compiling.Machine.here().width), of.LIKELIEST)
    except (ImportError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("the likeliest tokens are found by torch: no kernel could be made (%s)", error)
        return None
    if not _is_right(found):
        logger.warning("the likeliest tokens are found by torch: the kernel is wrong")
        return None
    return found


@torch.inference_mode()
def _is_right(found: Likeliest) -> bool:
    logits = torch.randn(4, 1100, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[1, 1090], logits[2, 700:710], logits[3, 5] = 9.0, 9.0, -torch.nan
    return torch.equal(found(logits), torch.argmax(logits, dim=-1))
