"""Plans a step: how far each of the running sequences gets, within a budget of tokens.

1. every sequence that misses one token, or forced ones too, gets them; the policy says which rows sit out;
2. prompts get what the pace allows beside those that decode; the policy divides it;
3. where no prompt is computed, guesses take what is left of the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial

from serve_app.engine.scheduler.pace import SHORT_PROMPT, Pace
from serve_app.engine.scheduler.policy import Beyond, Claim, FairShares
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from serve_app.engine.speculation.speculator import Speculator

Cuts = Mapping[Sequence, int]


class Planner:
    """Plans the spans of a step. Changes no sequence, and takes blocks for guesses alone.

    reserve: makes room for so many tokens of a sequence, where nobody loses by it
    """

    def __init__(
        self,
        policy: FairShares,
        speculator: Speculator | None,
        *,
        reserve: Callable[[Sequence, int], bool],
        max_batch_tokens: int,
        max_logit_rows: int,
        max_forced: int,
        clock: Callable[[], float],
    ) -> None:
        self._policy, self._speculator = policy, speculator
        self._reserve = reserve
        self._max_batch_tokens = max_batch_tokens
        self._max_logit_rows = max_logit_rows
        self._max_near = 1 + max_forced
        self._clock = clock

    def batch(self, running: Items[Sequence], pace: Pace, *, cuts: Cuts) -> Batch:
        """Plan a step; no sequence is in it whose prefix is still being copied.

        running: by age;  pace: at which prompts are computed beside others
        cuts:    up to where some prompts had better be computed where nobody decodes
        """
        ready = [each for each in running if (holding := each.place.holding) is not None and not holding.pending]
        near = [each for each in ready if self.is_near(each)]
        prompts = [each for each in ready if not self.is_near(each)]
        chosen, beyond = self._chosen(near, pace, has_prompts=bool(prompts))
        spans = self._nearest(chosen)
        if chunks := self._chunks(prompts, spans, pace, is_shared=len(chosen) < len(near), cuts=cuts):
            return Batch(tuple(sorted(spans, key=_by_length_and_place) + chunks), beyond)
        guessed = self._guessed(spans, num_running=len(running))
        return Batch(tuple(sorted(guessed, key=_by_length_and_place)), beyond)

    def is_near(self, sequence: Sequence) -> bool:
        """Return whether it misses no more than one token and those that it forced."""
        return sequence.num_missing == 1 or (sequence.is_prompt_computed and sequence.num_missing <= self._max_near)

    def _chosen(self, near: Items[Sequence], pace: Pace, *, has_prompts: bool) -> tuple[Items[Sequence], Beyond]:
        """Return those whose rows do not sit out; the last tokens of prompts are all computed."""
        decoding = [each for each in near if each.is_prompt_computed]
        shares = [each.request.share for each in decoding]
        out, beyond = self._policy.rows(shares, partial(pace.rows, is_shared=has_prompts))
        resting = {id(decoding[row]) for row in out}
        return [each for each in near if id(each) not in resting], beyond

    def _nearest(self, near: Items[Sequence]) -> list[Span]:
        """Give every sequence a token, and as many as can be of those that were forced behind it."""
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
        """Give prompts that miss more than a token a part of them.

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
        lengths = self._prompt_tokens(prompts, left)
        spans = []
        for sequence in prompts:
            length = lengths[id(sequence)]
            if not decoding and sequence in cuts:
                length = min(length, cuts[sequence] - sequence.num_computed)
            span = self._span(sequence, length, rows)
            rows -= span.scores
            if span.length:
                spans.append(span)
        return spans

    def _prompt_tokens(self, prompts: Items[Sequence], left: int) -> dict[int, int]:
        """Divide `left` tokens among the prompts, by their `id`: among lines by the policy, then within each line.

        A class below others moves up while its oldest prompt is in work.
        """
        wanted = {id(sequence): sequence.num_missing for sequence in prompts}
        if left >= sum(wanted.values()):
            return wanted
        lines: dict[object, list[Sequence]] = {}
        for sequence in prompts:
            lines.setdefault(self._policy.line_of(sequence.request.share), []).append(sequence)
        if len(lines) == 1:
            return _within_line(prompts, left)
        claims = [self._claim(line, number) for number, line in enumerate(lines.values())]
        tokens: dict[int, int] = {}
        for line, amount in zip(lines.values(), self._policy.divide(claims, left), strict=True):
            tokens |= _within_line(line, amount)
        return tokens

    def _claim(self, line: Items[Sequence], number: int) -> Claim:
        share, now = line[0].request.share, self._clock()
        began_at = now if line[0].place.started_at is None else line[0].place.started_at
        since = max(began_at, now - self._policy.rules.max_wait_s)  # in work already: age raises the class and no more
        key = self._policy.turn_key(share, owed=0.0, since=since, is_kept=False, number=number, now=now)
        return Claim(key, share.weight, sum(sequence.num_missing for sequence in line))

    def _guessed(self, spans: list[Span], *, num_running: int) -> list[Span]:
        """Add guesses within what the step has left; while prompts are to be computed nothing is to spare."""
        is_waited_for = len(spans) < num_running or not all(span.decodes for span in spans)
        if self._speculator is None or is_waited_for:
            return spans
        rows = self._max_logit_rows - sum(span.scores for span in spans)
        left = min(rows, self._max_batch_tokens - sum(span.length for span in spans))
        return self._speculator.extend(spans, max(left, 0), reserve=self._reserve)

    @staticmethod
    def _span(sequence: Sequence, budget: int, rows: int) -> Span:
        """Return as much of the sequence as the budgets allow; length 0 where they allow nothing."""
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


def reasons_to_hurry(prompts: Items[Sequence], decoding: Items[Sequence]) -> list[int]:
    """Return the tokens that each prompt behind the first misses. If a flow decodes that has no prompt here, only the
    oldest prompt of each flow counts.

    So a flow that sends many short prompts at once stretches the steps of its own sequences, and nobody else's; and of
    many flows that send one each, none waits for all others before it.

    prompts: oldest first
    """
    oldest: dict[str, int] = {}
    for each in prompts:
        oldest.setdefault(each.request.share.flow, each.num_missing)
    if any(each.request.share.flow not in oldest for each in decoding):
        return list(oldest.values())[1:]
    return [each.num_missing for each in prompts[1:]]


def short_and_unwatched(prompts: Items[Sequence], decoding: Items[Sequence]) -> int:
    """Return the tokens of short prompts that need not be spread over steps for the sake of sequences that decode.

    That holds if nobody reads those sequences before they end, and all are of one flow.

    They end together then, about as late in the mean, and the last of them sooner. Long prompts gain nothing by that.
    """
    flow = prompts[0].request.share.flow
    if not all(each.request.is_read_whole and each.request.share.flow == flow for each in decoding):
        return 0
    if any(each.request.share.flow != flow for each in prompts):
        return 0
    return sum(each.num_missing for each in prompts if each.prompt_length <= SHORT_PROMPT)


def _within_line(prompts: Items[Sequence], left: int) -> dict[int, int]:
    """Give the oldest half of what may be computed, and the rest to those that miss least.

    So a short prompt does not wait for a long one, and a long one gets on however many short ones come.
    """
    others = sorted(prompts[1:], key=lambda each: each.num_missing)
    oldest = min(prompts[0].num_missing, left if not others else -(-left // 2))
    left -= oldest
    tokens: dict[int, int] = {}
    for sequence in others:
        tokens[id(sequence)] = min(sequence.num_missing, left)
        left -= tokens[id(sequence)]
    tokens[id(prompts[0])] = min(prompts[0].num_missing, oldest + left)
    return tokens


def _by_length_and_place(span: Span) -> tuple[bool, int]:
    """Put single tokens first, as they attend together."""
    holding = span.sequence.place.holding
    assert holding is not None, f"{span.sequence} has no place"
    return span.num_computed > 1, holding.place
