"""Verifies guesses: draws each next token, and goes on as long as the drawn tokens equal the guesses.

The sampler draws every token as without guesses: from logits of the same tokens, by the random numbers of its own
position. A guess is only compared with what was drawn. It never enters a sequence's state, so nothing is rolled back.

Nothing is lost by that. Rejection sampling (Leviathan et al., arXiv 2211.17192) accepts a guess x with probability
min(1, p(x) / q(x)). Here a guess is certain, q(x) = 1, so that is p(x): the probability that drawing gives x.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from serve_app.core.delta import Delta, joined_by_sequence
from serve_app.engine.sampling.masks import MaskComputer
from serve_app.engine.sampling.output import Output
from serve_app.engine.sampling.sampler import Begun, Sampler
from serve_app.engine.scheduler.sequence import Batch, Span, num_common


class Verifier:
    """Draws a step's tokens and commits them; the sampler has begun with them.

    num_drafted, num_accepted: guesses that were computed, and those that were drawn with something behind them
    """

    def __init__(self, masks: MaskComputer, sampler: Sampler, output: Output) -> None:
        self._masks = masks
        self.sampler = sampler
        self._output = output
        self.num_drafted = 0
        self.num_accepted = 0

    def finish(self, begun: Begun, standing: Items[bool]) -> list[Delta]:
        """Return one delta per sequence that gained something. Changes sequences; releases none.

        standing: of each span whether it is wanted still
        """
        batch, logits = begun.batch, begun.logits
        sampled = self.sampler.finish(begun)
        if not all(standing):
            stays = [number for number, stands in enumerate(standing) if stands]
            batch, sampled = Batch(tuple(batch.spans[at] for at in stays)), [sampled[at] for at in stays]
        # with the row of its last own token's logits; those behind its guesses are the rows after it
        guessed = [(s, row + s.scores) for s, row in zip(batch.spans, batch.first_rows, strict=True) if s.draft]
        for span, _ in guessed:
            self.num_drafted += len(span.draft)
            span.sequence.spent.num_drafted += len(span.draft)
        deltas = self._output.commit(batch, sampled)
        if not guessed:
            return deltas
        while follows := [(span, row, known) for span, row in guessed if (known := known_span(span)) is not None]:
            for _, _, known in follows:
                self.num_accepted += known.length
                known.sequence.spent.num_accepted += known.length
            batch = Batch(tuple(known for _, _, known in follows))
            rows = [each for span, row, known in follows for each in _rows(known, row + known.start - (span.end - 1))]
            sampled = self.sampler.sample(logits[rows], batch, self._masks.begin(batch))
            deltas += self._output.commit(batch, sampled)
            guessed = [(span, row) for span, row, _ in follows]
        return joined_by_sequence(deltas)


def known_span(guessed: Span) -> Span | None:
    """Return the span of a sequence that is missing and was computed as a guess, so that it needs no step of its own.

    None if what was drawn differs from the guess, or nothing more was guessed, or the sequence is at its end. What a
    constraint has forced behind the drawn token is part of it, if that was guessed, too.
    """
    sequence = guessed.sequence
    start = sequence.num_computed
    draft = guessed.draft[start - guessed.end :]
    missing = sequence.token_ids[start:]
    if sequence.is_finished or start < guessed.end or not draft or not missing:
        return None
    length = num_common(missing, draft)
    scores = min(length, sequence.num_held)
    return Span(sequence, start, length, samples=length == len(missing), scores=scores) if length else None


def _rows(span: Span, first: int) -> list[int]:
    """Return the rows of its scored positions, then of its last if that is sampled; as in any batch."""
    return [*range(first, first + span.scores), *([first + span.length - 1] if span.samples else [])]
