"""What one step computes: spans of sequences, packed into one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens of a sequence from position `start` on.

    samples: its last token is the sequence's last, so the next one is drawn after this step
    scores:  its first positions, whose logits are wanted for the log-probabilities of the tokens behind them, which are
             the prompt's own or forced
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    scores: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def decodes(self) -> bool:
        """Whether it goes on with what was generated, rather than computing a prompt."""
        return self.start >= self.sequence.prompt_length


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of one step: single tokens first, by place, then chunks."""

    spans: tuple[Span, ...]

    @property
    def num_decoding(self) -> int:
        return sum(span.decodes for span in self.spans)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(span.length for span in self.spans if not span.decodes)

    def __bool__(self) -> bool:
        return bool(self.spans)
