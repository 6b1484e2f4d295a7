"""Passes over rows of logits by kernels of our own, where this machine has them."""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from serve_app.engine.cpu import compiling
from serve_app.engine.cpu.calling import Kernel
from serve_app.engine.decoder.openmp import libgomp

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 8
"""Of which the tallies lie in memory, 256 KiB each."""
SHORT = 1 << 15
"""Logits that one thread weighs in the time that it takes to wake another."""
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlay:
    """The tokens of a row that are in play: from a lowest to a highest logit, of these two those with such ids."""

    lowest: float = -inf
    highest: float = inf
    lowest_ids: tuple[int, int] = (0, torch.iinfo(torch.int32).max)
    highest_ids: tuple[int, int] = (0, torch.iinfo(torch.int32).max)


ALL = InPlay()


def bounds_of(in_play: Items[InPlay]) -> tuple[Tensor, Tensor]:
    """[n, 2] float32, the lowest and the highest logit, and [n, 4] int32, the first and last id of either."""
    bounds = torch.tensor([[each.lowest, each.highest] for each in in_play])
    return bounds, torch.tensor([[*each.lowest_ids, *each.highest_ids] for each in in_play], dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class Counted:
    """A row's distinct values by falling value, [n] float32, and how many tokens have each, [n] int64.

    others: [m] int64, ids of tokens whose values are not among them, as they need more than 16 bits
    """

    values: Tensor
    numbers: Tensor
    others: Tensor


class VocabularyKernels:
    """For rows of float32 in the host's memory."""

    def __init__(self, code: compiling.Code) -> None:
        from serve_app.engine.cpu import vocabulary_kernel as names

        self._weigh = Kernel(code, names.WEIGH)
        self._list = Kernel(code, names.LIST)
        self._count = Kernel(code, names.COUNT)

    @staticmethod
    def takes(logits: Tensor) -> bool:
        """Whether these rows can be read."""
        is_here = logits.device.type == "cpu" and logits.dtype == torch.float32
        return is_here and logits.dim() == 2 and logits.stride(1) == 1

    def weigh(
        self, logits: Tensor, rows: Items[int], highest: Tensor, divisors: Tensor, bounds: Tensor, ends: Tensor
    ) -> Tensor:
        """The sums of exp((logit - highest) / divisor) over 64 columns each of what is in play, to seven digits.

        logits: [any rows, vocab], none of what is in play above highest [n];  divisors: [n]
        bounds, ends: as `bounds_of` gives them
        Returns [n, blocks] float64, of these rows.
        """
        from serve_app.engine.cpu import vocabulary_kernel as of

        num_sums = -(-logits.shape[1] // of.BLOCK)
        sums = torch.empty(len(rows), num_sums)
        given = (*(each.contiguous() for each in (bounds, ends, highest.float(), divisors.float())), sums)
        self._run(self._weigh, logits, rows, *(each.data_ptr() for each in given), num_sums)
        return sums.double()

    def ids(self, row: Tensor, in_play: InPlay, count: int, *, first: int = 0) -> Tensor:
        """Ids of tokens that are in play, by rising id, so many from the first on. row: [vocab];  -> [count] int64"""
        bounds, ends = bounds_of([in_play])
        found = torch.empty(count + 1, dtype=torch.int32)
        self._run(self._list, row[None], [0], bounds.data_ptr(), ends.data_ptr(), first, count, found.data_ptr())
        return found[:count].long()

    def count(self, logits: Tensor, rows: Items[int]) -> list[Counted | None]:
        """The values that rows have; None for a row of too many. Of minus infinity nothing is told."""
        found: list[Counted | None] = []
        for first in range(0, len(rows), ROWS_AT_ONCE):
            found += self._count_some(logits, rows[first : first + ROWS_AT_ONCE])
        return found

    def _count_some(self, logits: Tensor, rows: Items[int]) -> list[Counted | None]:
        from serve_app.engine.cpu import vocabulary_kernel as of

        size = len(rows)
        tallies = torch.empty(size, of.NUM_TALLIES, dtype=torch.int32)
        values = torch.empty(size, of.MOST_VALUES)
        numbers = torch.empty(size, of.MOST_VALUES, dtype=torch.int32)
        others = torch.empty(size, of.MOST_OTHERS, dtype=torch.int32)
        found = torch.empty(size, 2, dtype=torch.int32)
        made = (tallies, values, numbers, others, found)
        self._run(self._count, logits, rows, 0, *(each.data_ptr() for each in made))
        counted: list[Counted | None] = []
        for at, (num_values, num_others) in enumerate(found.tolist()):
            if num_values >= of.MOST_VALUES or num_others >= of.MOST_OTHERS:
                counted.append(None)
                continue
            num_values -= num_values > 0 and float(values[at, num_values - 1]) == -inf
            own = values[at, :num_values], numbers[at, :num_values].long()
            counted.append(Counted(*own, others[at, :num_others].long()))
        return counted

    def _run(self, kernel: Kernel, logits: Tensor, rows: Items[int], *parameters: int) -> None:
        numbers = torch.tensor(rows)
        vocab, size = logits.shape[1], len(rows)
        given = (size, logits.data_ptr(), logits.stride(0), numbers.data_ptr(), vocab)
        kernel(*given, *parameters, is_short=size == 1 or size * vocab <= SHORT)


@functools.cache
def vocabulary_kernels() -> VocabularyKernels | None:
    """None where this machine has none. They are tried beside torch first."""
    if libgomp() is None:
        return None
    try:
        from serve_app.engine.cpu import vocabulary_kernel

        kernels = VocabularyKernels(compiling.compiled(vocabulary_kernel.emit, width=compiling.Machine.here().width))
    except (ImportError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("passes over vocabularies are torch's: no kernels could be made (%s)", error)
        return None
    if not _are_right(kernels):
        logger.warning("passes over vocabularies are torch's: the kernels are wrong")
        return None
    return kernels


@torch.inference_mode()
def _are_right(kernels: VocabularyKernels) -> bool:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    logits[1, 7], logits[1, 9], highest = 0.1, -inf, logits.amax(-1)
    sums = kernels.weigh(logits, [2, 1], highest[[2, 1]], torch.tensor([1.0, 0.5]), *bounds_of([ALL, ALL]))
    expected = torch.exp((logits[[2, 1]] - highest[[2, 1], None]) / torch.tensor([[1.0], [0.5]])).double()
    if not torch.allclose(sums.sum(-1), expected.sum(-1), rtol=TOLERANCE):
        return False
    in_play = InPlay(lowest=0.1, lowest_ids=(0, 7), highest=1.0)
    inside = torch.nonzero((logits[1] > 0.1) & (logits[1] <= 1.0) | (torch.arange(200) == 7))[:, 0]
    if not torch.equal(kernels.ids(logits[1], in_play, len(inside) - 1, first=1), inside[1:]):
        return False
    (counted,) = kernels.count(logits, [1])
    finite = logits[1][logits[1].isfinite()]
    values, numbers = torch.unique(finite[finite != logits[1, 7]], return_counts=True)
    if counted is None or counted.others.tolist() != [7]:
        return False
    return torch.equal(counted.values, values.flip(0)) and torch.equal(counted.numbers, numbers.flip(0))
