"""What one step computes: spans of sequences, packed into one row of tokens."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from serve_app.engine.scheduler.pace import NONE_BEYOND, Beyond
from serve_app.engine.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens of a sequence from position `start` on.

    samples: its last token is the sequence's last, so the next one is drawn after this step
    scores:  its first positions, whose logits are wanted for the log-probabilities of the tokens behind them, which are
             the prompt's own or forced
    draft:   guesses of the tokens behind it, computed with it; where there are any, its last token is sampled, and the
             logits of each guess are wanted, too
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    scores: int = 0
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_computed(self) -> int:
        """Tokens that are computed for it, guesses included."""
        return self.length + len(self.draft)

    @property
    def num_rows(self) -> int:
        """Of logits."""
        return self.scores + self.samples + len(self.draft)

    @property
    def decodes(self) -> bool:
        """Whether it goes on with what was generated, rather than computing a prompt."""
        return self.start >= self.sequence.prompt_length


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of one step: single tokens first, by place, then chunks.

    beyond: of those that decode
    """

    spans: tuple[Span, ...]
    beyond: Beyond = NONE_BEYOND

    @property
    def num_decoding(self) -> int:
        return sum(span.decodes for span in self.spans)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(span.length for span in self.spans if not span.decodes)

    @property
    def num_guesses(self) -> int:
        return sum(len(span.draft) for span in self.spans)

    @property
    def first_rows(self) -> list[int]:
        """Where the logits of each span begin among those of the batch."""
        first_rows, row = [], 0
        for span in self.spans:
            first_rows.append(row)
            row += span.num_rows
        return first_rows

    def __bool__(self) -> bool:
        return bool(self.spans)


def num_common(left: Items[int], right: Items[int]) -> int:
    """How many tokens both begin with."""
    differing = (place for place, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differing, min(len(left), len(right)))
