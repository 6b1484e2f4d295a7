"""Our sampler as vLLM's logits processor, so that every sampling parameter means the same whatever engine computes.

vLLM draws greedily. The processor draws each row as our engine does, and leaves the drawn token as the likeliest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from serve_app.engine.decoder.memory import host_copy_for
from serve_app.engine.sampling.masks import MaskComputer, StepMasks
from serve_app.engine.sampling.sampler import SampledSpan, Sampler
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "serve_app"
"""Of `SamplingParams.extra_args`, under which a request brings its `Row`."""


@dataclass(eq=False, slots=True)
class Draws:
    """What is drawn in the steps of one engine.

    results: of the last step, by the sequence's identity
    """

    sampler: Sampler
    computer: MaskComputer = field(default_factory=MaskComputer)
    masks: StepMasks | None = None
    results: dict[int, SampledSpan] = field(default_factory=dict)

    @classmethod
    def on(cls, device: torch.device, eos_token_ids: frozenset[int]) -> Draws:
        return cls(Sampler(eos_token_ids, land=host_copy_for(device)))

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Begin a step: masks of constrained sequences are computed beside the forward."""
        self.results.clear()
        self.masks = self.computer.begin(_batch(sequences))

    def draw(self, logits: Tensor, sequences: list[Sequence]) -> list[int | None]:
        """Draw one token per row of logits, [rows, vocab] float32; None where there is none to draw."""
        results = self.sampler.sample(logits, _batch(sequences), self.masks)
        self.results |= zip(map(id, sequences), results, strict=True)
        return [result.token_id for result in results]

    def close(self) -> None:
        self.computer.close()


@dataclass(frozen=True, slots=True)
class Row:
    """What a request brings along to its row of the batch.

    samples: whether a token is drawn behind what this step computes of it, and not only a part of its prompt
    """

    sequence: Sequence
    draws: Draws
    samples: Callable[[], bool]


class DrawProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM may be missing
    """Draws with our sampler for every row of vLLM's batch. One request per row, in this very process."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow where vLLM puts its requests."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._rows.pop(place, None)
        for place, params, _, _ in batch_update.added:
            row = (params.extra_args or {}).get(KEY)
            self._rows.pop(place, None)
            if row is not None:  # vLLM's own warm-up brings none
                self._rows[place] = row
        for here, there, direction in batch_update.moved:
            ours, theirs = self._rows.pop(here, None), self._rows.pop(there, None)
            if ours is not None:
                self._rows[there] = ours
            if theirs is not None and direction is MoveDirectionality.SWAP:
                self._rows[here] = theirs

    def apply(self, logits: Tensor) -> Tensor:
        """Draw, and make each drawn token the likeliest of its row. logits: [rows, vocab] float32"""
        drawing = [(place, row) for place, row in sorted(self._rows.items()) if row.samples()]
        if not drawing:
            return logits
        places = [place for place, _ in drawing]
        own = logits if places == list(range(len(logits))) else logits[places]
        tokens = drawing[0][1].draws.draw(own, [row.sequence for _, row in drawing])
        known = [(place, token) for place, token in zip(places, tokens, strict=True) if token is not None]
        if known:
            rows, columns = (torch.tensor(part, device=logits.device) for part in zip(*known, strict=True))
            logits[rows, columns] = inf
        return logits


def _batch(sequences: Iterable[Sequence]) -> Batch:
    """Return a step that draws one token behind each sequence's last."""
    return Batch(tuple(Span(each, each.num_tokens - 1, 1, samples=True) for each in sequences))
