"""Calls of kernels one after the other as one: no thread is woken, and no interpreter asked, between two of them."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.calling import Kernel
from serve_app.engine.decoder.openmp import libgomp

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One of them.

    names: of all the kernel's parameters, the counter's first;  given: those that are known already
    keeps: what has memory that they are addresses of, and would be gone otherwise
    """

    kernel: Kernel
    names: Sequence[str]
    given: Mapping[str, int]
    keeps: object = None


class Spare:
    """Memory in which a call leaves what the next one reads, for so many rows: inputs as whole numbers.

    scales: [num_rows, 1] float32
    """

    def __init__(self, num_rows: int) -> None:
        self.scales = torch.empty(num_rows, 1)
        self._whole: dict[int, torch.Tensor] = {}

    def whole(self, size: int) -> torch.Tensor:
        """[num_rows, size] uint8"""
        if size not in self._whole:
            self._whole[size] = torch.empty(len(self.scales), size, dtype=torch.uint8)
        return self._whole[size]


class CallSequence:
    """The same calls again and again, some of whose parameters change in between."""

    def __init__(self, carrier: Kernel, calls: Sequence[Call]) -> None:
        """carrier: `carrier()`"""
        from serve_app.engine.cpu import sequence_kernel as of

        self._carrier = carrier
        self._calls = tuple(calls)  # their code, and what they keep, lasts as long as this
        self._begin = of.BEGIN
        self._table = torch.zeros(len(calls), of.FIELDS, dtype=torch.int64)
        first, size = self._table.data_ptr(), self._table.itemsize
        rows = []
        for number, call in enumerate(calls):
            counter = first + (number * of.FIELDS + of.BEGIN - 1) * size
            known = [call.given.get(name, 0) for name in call.names[1:]]
            row = [call.kernel.address, 0, counter, *known]
            rows.append(row + [0] * (of.FIELDS - len(row)))
        self._table.copy_(torch.tensor(rows))

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, numbers: torch.Tensor, **parameters: int | torch.Tensor) -> None:
        """Parameters of some calls, [count] int64, whose names are at the same places in all of them.

        One number for all, or as many as there are calls.
        """
        names = self._calls[int(numbers[0])].names
        for name, value in parameters.items():
            self._table[numbers, self._begin + names.index(name)] = torch.as_tensor(value)

    def __call__(self, count: int, *, is_alone: bool = False) -> None:
        """Carry out the first of them, by one thread or all; the interpreter may be asked by others meanwhile."""
        self._table[:, self._begin - 1] = 0
        num_threads = 1 if is_alone else None
        self._carrier(count, self._table.data_ptr(), _barrier(), is_short=False, num_threads=num_threads)


@functools.cache
def carrier() -> Kernel | None:
    """What carries calls out; None where this machine has no kernels."""
    if libgomp() is None:
        return None
    try:
        from serve_app.engine.cpu import sequence_kernel as of

        return Kernel(compiling.compiled(of.emit), of.NAME)
    except (ImportError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("layers are computed one kernel after the other (%s)", error)
        return None


@functools.cache
def _barrier() -> int:
    """Where libgomp's own begins, at which a team waits for all of its threads."""
    library = libgomp()
    assert library is not None
    address = ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value
    assert address is not None
    return address
