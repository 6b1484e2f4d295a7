"""Which steps' logits may stay as the model gives them: those of which nothing but the likeliest tokens is wanted."""

from __future__ import annotations

from torch import Tensor

from serve_app.engine.cpu.likeliest import Likeliest, likeliest_kernel
from serve_app.engine.scheduler.sequence import Batch, Span


def widened(logits: Tensor, batch: Batch) -> Tensor:
    """In float32, but for bfloat16 of a batch that wants no more than the likeliest token of each row, where a kernel
    finds it: to write and read four bytes for each token takes several times as long.

    logits: [rows, vocab], of a step that computed the batch
    """
    if Likeliest.takes(logits) and all(map(_wants_the_likeliest, batch.spans)) and likeliest_kernel() is not None:
        return logits
    return logits.float()


def _wants_the_likeliest(span: Span) -> bool:
    if span.scores or span.draft:
        return False
    sequence = span.sequence
    request = sequence.request
    return not span.samples or (request.sampling.is_greedy and request.logprobs is None and sequence.matcher is None)
