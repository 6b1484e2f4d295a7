"""Computes which tokens constrained sequences may draw, beside the forward of the step that they are drawn after."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from serve_app.constraints.matcher import Masks
from serve_app.engine.scheduler.sequence import Batch


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Of the constrained sequences of one step; there once `work` is done.

    bits: [n, words] int32 in the CPU's memory; bit i of a row's words, lowest first, says whether token i is allowed
    rows: by the sequence's identity
    """

    bits: Tensor
    rows: Mapping[int, int]
    work: Future[None]

    def wait(self) -> None:
        """Raises what computing them raised."""
        self.work.result()


class MaskComputer:
    """Has one thread, in which the library's own threads are waited for. Costs nothing where nothing is constrained."""

    def begin(self, batch: Batch) -> StepMasks | None:
        """Begin with the masks of all that samples after this step; None where none is constrained."""
        constrained = [
            (id(span.sequence), matcher)
            for span in batch.spans
            if span.samples and (matcher := span.sequence.matcher) is not None and matcher.failure is None
        ]
        if not constrained:
            return None
        matchers = [matcher for _, matcher in constrained]
        bits = torch.zeros((len(matchers), matchers[0].num_words), dtype=torch.int32)
        rows = {identity: row for row, (identity, _) in enumerate(constrained)}
        return StepMasks(bits, rows, self._thread.submit(lambda: self._masks.fill(matchers, bits.data_ptr())))

    def close(self) -> None:
        if "_thread" in self.__dict__:
            self._thread.shutdown()

    @cached_property
    def _masks(self) -> Masks:
        return Masks()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="masks")
