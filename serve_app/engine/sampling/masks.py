"""Computes the masks of constrained sequences, beside the forward of the step that they are drawn after."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from serve_app.constraints.vocabulary import Masks
from serve_app.engine.decoder.memory import sent
from serve_app.engine.scheduler.sequence import Batch

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Masks of the constrained sequences of one step; there once `work` is done.

    bits: [n, words] int32 in the CPU's memory; bit i of a row's words, lowest first, says whether token i is allowed
    rows: by the sequence's identity
    """

    bits: Tensor
    rows: Mapping[int, int]
    work: Future[None]

    def wait(self) -> None:
        """Wait for the masks. Raises what computing them raised."""
        self.work.result()


class MaskComputer:
    """Computes masks in a thread that waits for the library's own. Costs nothing where nothing is constrained."""

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


def is_allowed(bits: Tensor, token_id: int) -> bool:
    """Return whether one row's bits, [words] int32, allow a token."""
    return bool(int(bits[token_id // WORD_BITS]) >> (token_id % WORD_BITS) & 1)


def restrict(logits: Tensor, bits: Tensor) -> Tensor:
    """Return a copy in which what is not allowed is -inf, whatever it was.

    logits: [rows, vocab];  bits: [rows, words] int32, see `StepMasks`
    """
    return torch.where(unpacked(bits, logits.shape[-1], logits.device), logits, -inf)


def unpacked(bits: Tensor, vocab: int, device: torch.device) -> Tensor:
    """Unpack bits on a device, to which the bits alone are sent; [rows, words] int32 -> [rows, vocab] bool."""
    words = sent(bits, device)
    flags = (words[:, :, None] >> torch.arange(WORD_BITS, dtype=torch.int32, device=device)) & 1
    return flags.flatten(1)[:, :vocab].bool()
