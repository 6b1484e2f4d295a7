"""How far each of the sequences that run gets in one step: everything only catches up, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items

from serve_app.engine.scheduler.batch import Batch, Span
from serve_app.engine.scheduler.counters import Counters
from serve_app.engine.scheduler.pace import Pace
from serve_app.engine.scheduler.prompt_shares import prompt_shares, reasons_to_hurry, short_and_unwatched
from serve_app.engine.scheduler.row_shares import RowShares
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.engine.speculation.speculator import Room, Speculator

Cuts = Mapping[Sequence, int]


class Planner:
    """Plans the spans of a step. Changes no sequence, and takes blocks for guesses alone.

    reserve: makes room for so many tokens of a sequence, where nobody loses by it
    """

    def __init__(
        self,
        counters: Counters,
        speculator: Speculator | None,
        *,
        reserve: Callable[[Sequence, int], bool],
        max_batch_tokens: int,
        max_logit_rows: int,
        max_forced: int,
        clock: Callable[[], float],
    ) -> None:
        self._counters, self._speculator = counters, speculator
        self._reserve = reserve
        self._max_batch_tokens = max_batch_tokens
        self._max_logit_rows = max_logit_rows
        self._max_near = 1 + max_forced
        self._clock = clock
        self._rows = RowShares(counters)

    def batch(self, running: Items[Sequence], pace: Pace, *, cuts: Cuts) -> Batch:
        """Sequences that miss a token, or forced ones too, but not all that some flow has beyond others;
        then a share of the prompts. None that is not filled yet.

        running: by age;  pace: at which prompts are computed beside others
        cuts:    up to where some prompts had better be computed where nobody decodes
        """
        filled = [each for each in running if each.holding is not None and not each.holding.pending]
        near: list[Sequence] = []
        prompts: list[Sequence] = []
        for each in filled:
            (near if self.is_near(each) else prompts).append(each)
        chosen, beyond = self._rows.chosen(near, pace, has_prompts=bool(prompts))
        spans = self._nearest(chosen)
        if chunks := self._chunks(prompts, spans, pace, is_shared=len(chosen) < len(near), cuts=cuts):
            return Batch(tuple(sorted(spans, key=_by_length_and_place) + chunks), beyond)
        guessed = self._guessed(spans, num_running=len(running))
        return Batch(tuple(sorted(guessed, key=_by_length_and_place)), beyond)

    def is_near(self, sequence: Sequence) -> bool:
        """Whether it misses no more than one token and those that it forced."""
        return sequence.num_missing == 1 or (sequence.is_prompt_computed and sequence.num_missing <= self._max_near)

    def _nearest(self, near: Items[Sequence]) -> list[Span]:
        """A token of every sequence that is near, and as many as can be of those that were forced behind it."""
        near = near[: self._max_batch_tokens]
        left, rows = self._max_batch_tokens - len(near), self._max_logit_rows
        spans = []
        for sequence in near:
            is_held = sequence.num_held > 0
            span = self._span(sequence, 1 + min(left, sequence.num_missing - 1), max(rows, 1) if is_held else rows)
            left -= max(span.length - 1, 0)
            rows -= span.scores if is_held else 0
            spans.append(span)
        return [span for span in spans if span.length]

    def _chunks(
        self, prompts: Items[Sequence], singles: Items[Span], pace: Pace, *, is_shared: bool, cuts: Cuts
    ) -> list[Span]:
        """Parts of the prompts that miss more than a token.

        is_shared: with rows of which some sit out
        """
        if not prompts:
            return []
        decoding = [span.sequence for span in singles if span.decodes]
        budget = self._max_batch_tokens - sum(span.length for span in singles)
        behind = reasons_to_hurry(prompts, decoding)
        left = pace.allowance(len(decoding), budget, behind=behind, is_shared=is_shared) if budget > 0 else 0
        left = max(left, min(budget, short_and_unwatched(prompts, decoding)))
        rows = self._max_logit_rows - sum(span.scores for span in singles)
        shares = prompt_shares(prompts, left, self._counters, now=self._clock())
        spans = []
        for sequence in prompts:
            length = shares[id(sequence)]
            if not decoding and sequence in cuts:
                length = min(length, cuts[sequence] - sequence.num_computed)
            span = self._span(sequence, length, rows)
            rows -= span.scores
            if span.length:
                spans.append(span)
        return spans

    def _guessed(self, spans: list[Span], *, num_running: int) -> list[Span]:
        """These, with guesses within what the step has left; while prompts are to be computed nothing is to spare."""
        is_waited_for = len(spans) < num_running or not all(span.decodes for span in spans)
        if self._speculator is None or is_waited_for:
            return spans
        rows = self._max_logit_rows - sum(span.scores for span in spans)
        left = min(rows, self._max_batch_tokens - sum(span.length for span in spans))
        return self._speculator.extend(spans, Room(max_guesses=max(left, 0), reserve=self._reserve))

    @staticmethod
    def _span(sequence: Sequence, budget: int, rows: int) -> Span:
        """As much of the sequence as the budgets allow; length 0 where they allow nothing."""
        length = min(sequence.num_missing, budget)
        start = sequence.num_computed
        scores = 0
        if sequence.scores_prompt:
            length = min(length, max(rows, 0))
            scores = max(0, min(start + length, sequence.prompt_length - 1) - start)
        elif sequence.num_held:
            length = min(length, max(rows, 0))
            scores = min(length, sequence.num_held)
        ends = start + length == sequence.num_tokens
        return Span(sequence, start, length, ends and sequence.max_tokens > 0, scores)


def _by_length_and_place(span: Span) -> tuple[bool, int]:
    """Single tokens first, as they attend together."""
    assert span.sequence.holding is not None, f"{span.sequence} has no place"
    return span.num_computed > 1, span.sequence.holding.place
