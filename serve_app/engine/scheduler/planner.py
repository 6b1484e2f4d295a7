"""Plans a step: how far each of the running sequences gets, within a budget of tokens.

1. while a prompt of a higher class is computed, sequences of the class `batch` sit out;
2. every sequence that misses one token, or forced ones too, gets them; the policy says which rows sit out;
3. prompts get what the pace allows beside those that decode, as it has learned from steps; the policy divides it;
4. where no prompt is computed, guesses take what is left of the budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial

from serve_app.core.shares import BATCH
from serve_app.engine.scheduler.policy import NONE_BEYOND, Beyond, Claim, FairShares
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from serve_app.engine.speculation.speculator import Speculator

LEAST_TOKENS = 8
FIRST_TOKENS = 16
LEAST_ROWS = 4
MEMORY = 0.5
"""How much of the former estimate a new measurement leaves."""
MOST_GROWTH = 1.25
MOST_FALL = 2.0
"""Between two steps; what was allowed too much is somebody's gap, what was allowed too little is made up for."""
FEW = 8
"""Sequences that decode, up to which one prompt behind the first is a reason to hurry, by how much fewer there are."""
MANY = 32
"""Beyond so many, one prompt for each so many is none."""
SHORT_PROMPT = 256
"""Tokens; a prompt of twice as many is half a reason to hurry, as those that decode would wait twice as long for it."""
MOST_HURRY = 4.0
LOOK_AGAIN = 32
"""After so many steps with prompts, or rows of others, one is made without, to see what it takes by now."""
LOOK_SELDOM = 8
"""So many times as seldom where nothing of others was left out."""
MOST_WITHOUT = 8
"""Steps in a row that the class `batch` sits out for prompts of higher classes, so that it gets on beside many."""


def work_clock(device_type: str) -> Callable[[], float]:
    """Return a clock of what a step takes by itself, in seconds, for the thread that computes it.

    On a CPU that is what the thread has computed: what other threads and programs take of the CPUs meanwhile would
    otherwise pass for the cost of a step, and ever more prompt work would seem to fit beside it.
    """
    return time.thread_time if device_type == "cpu" else time.perf_counter


class Pace:
    """Learns from the steps that were made what a step takes, and steers the prompt work of those to come.

    max_stretch: a step with prompt work should take at most so many times a step without, unless many prompts wait.
                 Rows beyond those of other flows may stretch a step half as far, or to `max_stretch` times a step
                 with the rows of the flow that has the fewest
    least:       tokens of prompts that a step may compute all the same, so that these get on

    The prompt tokens allowed follow what they were seen to cost: no model of the machine, the context or the model is
    needed, and none has to be right. What is computed does not depend on it, only when.

    If several short prompts wait behind the first, a step may be stretched by more: in proportion to their number, up
    to four times as much. A step reads all weights for few rows until those are there, so all are served sooner.
    Long prompts hurry nobody.
    """

    def __init__(self, max_stretch: float, least: int = LEAST_TOKENS) -> None:
        self._max_stretch = max_stretch
        self._tokens, self._rows = Allowance(least, max(least, FIRST_TOKENS)), Allowance(LEAST_ROWS, LEAST_ROWS)
        self._decode_s: dict[int, float] = {}  # by the size of the number of rows
        self._num_since: dict[int, int] = {}  # steps with prompts since that was seen
        self._num_beyond_since: dict[int, int] = {}  # steps with rows beyond so many

    def allowance(self, num_decoding: int, budget: int, *, behind: Items[int] = (), is_shared: bool = False) -> int:
        """Return the prompt tokens for the next step, at most `budget`; all of it if nobody would have to wait.

        behind:    the tokens that each prompt behind the first misses
        is_shared: with rows beyond others' that not all are in the step either, so that each has half of what it might

        0 where it is not known, or no longer, what a step of that size without takes: the next one shows it. Another
        size's would make prompts look dearer than they are, or cheaper.
        """
        if num_decoding == 0:
            return budget
        if self._num_since.get(_size(num_decoding), LOOK_AGAIN) >= LOOK_AGAIN:
            return 0
        allowed = self._tokens.amount * _hurry(behind, num_decoding)
        return max(1, min(budget, int(self._tokens.half_of(allowed) if is_shared else allowed)))

    def rows(self, num_level: int, num_beyond: int, *, is_shared: bool = False) -> int:
        """Return how many rows that some have beyond others the next step may compute beside those that all have.

        is_shared: with prompts

        0 where it is not known, or no longer, what a step without them takes: the next one shows it. Where it does not,
        as prompts end in it, they are not kept waiting for that.
        """
        amount = self._rows.amount
        size, allowed = _size(num_level), int(self._rows.half_of(amount) if is_shared else amount)
        many = LOOK_AGAIN if allowed < num_beyond else LOOK_AGAIN * LOOK_SELDOM
        if self._num_beyond_since.get(size, many) >= many:
            self._num_since[size] = LOOK_AGAIN  # nor are prompts in it
            self._num_beyond_since[size] = many - LOOK_SELDOM
            return 0
        return min(allowed, num_beyond)

    def note(self, num_decoding: int, num_prompt_tokens: int, seconds: float, *, beyond: Beyond = NONE_BEYOND) -> None:
        """Learn from a step; seconds as `work_clock` counts them.

        beyond: of the rows that decoded, those that `rows` allowed
        """
        if num_decoding == 0:
            return
        size, level = _size(num_decoding), _size(num_decoding - beyond.num_rows)
        is_of_level = beyond.num_rows == 0 or level != size
        if num_prompt_tokens == 0:
            self._num_since[size] = 0
            if is_of_level:
                self._decode_s[size] = MEMORY * self._decode_s.get(size, seconds) + (1 - MEMORY) * seconds
                self._num_beyond_since[size] = 0
        elif size in self._decode_s:
            self._num_since[size] += 1
            without_s = self._decode_s[size]
            self._tokens.steer(num_prompt_tokens, seconds - without_s, (self._max_stretch - 1) * without_s)
        if beyond.num_rows:
            self._num_beyond_since[level] = self._num_beyond_since.get(level, 0) + 1
            if num_prompt_tokens == 0 and level in self._decode_s:
                self._note_beyond(beyond, num_decoding, seconds, without_s=self._decode_s[level])

    def _note_beyond(self, beyond: Beyond, num_decoding: int, seconds: float, *, without_s: float) -> None:
        extra_s = seconds - without_s
        row_s = max(0.0, extra_s) / beyond.num_rows
        least_s = without_s - row_s * (num_decoding - beyond.num_rows - beyond.num_least)
        allowed_s = max((self._max_stretch - 1) / 2 * without_s, self._max_stretch * least_s - without_s)
        self._rows.steer(beyond.num_rows, extra_s, allowed_s)


class Allowance:
    """How much there may be in a step of what it could do without."""

    def __init__(self, least: int, first: int) -> None:
        self._least = least
        self.amount = float(first)

    def half_of(self, amount: float) -> float:
        return max(amount / 2, self._least)

    def steer(self, amount: int, extra_s: float, allowed_s: float) -> None:
        """Learn that `amount` took the step `extra_s` longer than one without, of which `allowed_s` is allowed."""
        wanted = amount * allowed_s / max(extra_s, 1e-9)
        if wanted > self.amount and amount < 0.8 * self.amount:
            return  # a step with less work than allowed says nothing of more
        wanted = min(max(wanted, self.amount / MOST_FALL), self.amount * MOST_GROWTH)
        self.amount = min(max(wanted, self._least), 1e6)


def _size(num_decoding: int) -> int:
    """Return which of the half octaves 1, 2, 3, 4–5, 6–7, 8–11, 12–15, … a number of rows is in."""
    return 2 * num_decoding.bit_length() + (num_decoding >> max(num_decoding.bit_length() - 2, 0) & 1)


def _hurry(behind: Items[int], num_decoding: int) -> float:
    """Return how many times as far a step may be stretched."""
    num_short = sum(min(1.0, SHORT_PROMPT / num_tokens) for num_tokens in behind)
    no_reason = min(num_decoding / FEW, max(1.0, num_decoding / MANY))
    return min(max(num_short / no_reason, 1.0), MOST_HURRY)


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
        self._num_without = 0  # steps in a row that had no room for the class `batch`

    def batch(self, running: Items[Sequence], pace: Pace, *, cuts: Cuts) -> Batch:
        """Plan a step; no sequence is in it whose prefix is still being copied.

        running: by age;  pace: at which prompts are computed beside others
        cuts:    up to where some prompts had better be computed where nobody decodes
        """
        there = [each for each in running if (holding := each.place.holding) is not None and not holding.pending]
        ready = self._without_batches(there)
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

    def _without_batches(self, ready: Items[Sequence]) -> Items[Sequence]:
        """Leave out the class `batch` while a prompt of a higher class is computed, so many steps in a row at most."""
        others = [each for each in ready if each.request.share.priority != BATCH]
        if self._num_without < MOST_WITHOUT and not all(each.is_prompt_computed for each in others):
            self._num_without += 1
            return others
        self._num_without = 0
        return ready

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
