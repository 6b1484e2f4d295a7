"""What one step computes: spans of sequences, packed into one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens of a sequence from position `start` on.

    samples: its last token is the sequence's last, so the next one is drawn after this step
    scores:  positions of it whose logits are wanted for the prompt's own log-probabilities
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    scores: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of one step: single tokens first, in the order of their lanes, then chunks."""

    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)
