"""How far each of the sequences that run gets in one step: everything only catches up, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items

from serve_app.core.shares import Share
from serve_app.engine.scheduler.counters import Counters
from serve_app.engine.scheduler.filling import Claim, filled
from serve_app.engine.scheduler.pace import SHORT_PROMPT, Pace
from serve_app.engine.scheduler.row_shares import RowShares
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from serve_app.engine.scheduler.turns import Standing, turn_key
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


def reasons_to_hurry(prompts: Items[Sequence], decoding: Items[Sequence]) -> list[int]:
    """The tokens that each prompt behind the first misses; where a flow would stutter that has no prompt here, of each
    flow behind the first only those of its oldest prompt.

    So who sends many short prompts at once stretches the steps of its own sequences, and nobody else's; and of many who
    send one each, none waits for all others before it.

    prompts: oldest first
    """
    oldest: dict[str, int] = {}
    for each in prompts:
        oldest.setdefault(each.request.share.flow, each.num_missing)
    if any(each.request.share.flow not in oldest for each in decoding):
        return list(oldest.values())[1:]
    return [each.num_missing for each in prompts[1:]]


def short_and_unwatched(prompts: Items[Sequence], decoding: Items[Sequence]) -> int:
    """Tokens of short prompts that need not be spread over steps for the sake of those that decode: nobody reads of
    these before they end, and all are of one flow.

    They end together then, about as late in the mean, and the last of them sooner. (16 prompts of 64 at once, for 64
    tokens each: 1.04 times the tokens per second; 32 of 128: the same, and the last first token after 7.6 s for 9.3. Of
    prompts of 1024 nothing is gained, and most would end later.)
    """
    flow = prompts[0].request.share.flow
    if not all(each.request.is_read_whole and each.request.share.flow == flow for each in decoding):
        return 0
    if any(each.request.share.flow != flow for each in prompts):
        return 0
    return sum(each.num_missing for each in prompts if each.prompt_length <= SHORT_PROMPT)


def prompt_shares(prompts: Items[Sequence], left: int, counters: Counters, *, now: float) -> dict[int, int]:
    """Tokens of each prompt, by the sequence's `id`, `left` in all.

    prompts: oldest first;  now: as `started_at` of the sequences

    Flows get what brings their counters together, in the order of their turns; a class below others moves up while its
    oldest prompt is in work.
    """
    wanted = {id(sequence): sequence.num_missing for sequence in prompts}
    if left >= sum(wanted.values()):
        return wanted
    groups: dict[tuple[str, str], list[Sequence]] = {}
    for sequence in prompts:
        share = sequence.request.share
        groups.setdefault((share.flow, share.priority), []).append(sequence)
    if len(groups) == 1:
        return _shares_of_one(prompts, left)
    claims = [_claim(group, counters, now=now, number=number) for number, group in enumerate(groups.values())]
    amounts = filled(claims, left, price=counters.rules.prefill_weight)
    shares: dict[int, int] = {}
    for group, amount in zip(groups.values(), amounts, strict=True):
        shares |= _shares_of_one(group, amount)
    return shares


def _claim(group: Items[Sequence], counters: Counters, *, now: float, number: int) -> Claim:
    rules, oldest = counters.rules, group[0]
    share: Share = oldest.request.share
    began_at = now if oldest.started_at is None else oldest.started_at
    since = max(began_at, now - rules.max_wait_s)  # in work already: age raises the class and no more
    standing = Standing(share=share, counter=counters.of(share.flow), since=since, number=number)
    wanted = sum(sequence.num_missing for sequence in group)
    return Claim(key=turn_key(standing, rules, now=now), weight=share.weight, wanted=wanted)


def _shares_of_one(prompts: Items[Sequence], left: int) -> dict[int, int]:
    """Half of what may be computed is the oldest's, the rest goes to those that miss least.

    So a short prompt does not wait for a long one, and a long one gets on however many short ones come.
    """
    others = sorted(prompts[1:], key=lambda each: each.num_missing)
    oldest = min(prompts[0].num_missing, left if not others else -(-left // 2))
    left -= oldest
    shares: dict[int, int] = {}
    for sequence in others:
        shares[id(sequence)] = min(sequence.num_missing, left)
        left -= shares[id(sequence)]
    shares[id(prompts[0])] = min(prompts[0].num_missing, oldest + left)
    return shares
