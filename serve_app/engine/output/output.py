"""Output: what a step drew becomes deltas. For each span `commit`

1. notes what is computed, and scores of prompt tokens;
2. appends the drawn token, and those that the constraint forces behind it;
3. carries constraint, text and stops on, and ends the sequence where it is time;
4. makes one delta of what can be shown now, which waits if its client reads nothing before the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

from serve_app.core.delta import Delta, FinishReason, TokenLogprob, TopLogprob, joined
from serve_app.core.errors import EngineFailed, InvalidRequest, ServeError
from serve_app.core.log_context import about
from serve_app.engine.output.prompt_report import PromptReporter
from serve_app.engine.sampling.forced import certain_score, forced_token, hold, steer_by_certainty, waits_for_scores
from serve_app.engine.sampling.logprobs import Scored
from serve_app.engine.sampling.sampler import SampledSpan
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from serve_app.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
"""Less than a person waits for a number on a console, and a score of steps of a small model."""


class Output:
    """Turns what a step gave into deltas. Changes sequences; releases nothing."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        eos_token_ids: frozenset[int],
        *,
        max_forced: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_forced: tokens that a constraint leaves no choice about, appended at once at most"""
        self._clock = clock
        self._tokenizer = tokenizer
        self._reporter = PromptReporter(tokenizer)
        self._eos_token_ids = eos_token_ids
        self._max_forced = max_forced
        self._coalescer = Coalescer()
        self.num_forced = 0

    def commit(self, batch: Batch, sampled: Items[SampledSpan]) -> list[Delta]:
        """Carry a step's results into its sequences; return what each gained. A failure is one sequence's alone."""
        deltas: list[Delta] = []
        self._coalescer.begin()
        for span, result in zip(batch.spans, sampled, strict=True):
            try:
                gained = _recorded(span.sequence, self._commit_one(span, result))
                deltas += self._coalescer.take(span.sequence, gained)
            except Exception:
                extra = about([span.sequence.request.client_request_id])
                logger.exception("what a step gave to %s could not be taken over", span.sequence, extra=extra)
                if not span.sequence.is_finished:
                    failure = _fail(span.sequence, "the engine failed to take over what it had computed")
                    deltas += self._coalescer.take(span.sequence, [failure])
        return deltas

    def finish_unsampled(self, sequence: Sequence) -> list[Delta]:
        """End a request for which nothing is to be generated, its siblings with it."""
        deltas = []
        for one in (sequence, *sequence.forks):
            report = self._reporter.report(one)
            finish = one.end(FinishReason.LENGTH)
            deltas.append(Delta(request_id=one.request.request_id, sample=one.sample, prompt=report, finish=finish))
        sequence.forks = []
        return deltas

    def _commit_one(self, span: Span, result: SampledSpan) -> list[Delta]:
        sequence = span.sequence
        sequence.num_computed = span.end
        if not span.decodes:
            self._note_prompt(span, result)
        if not sequence.is_prompt_computed:
            return []
        if (refusal := _refusal(sequence)) is not None:
            return [_lose(sequence, refusal)]
        if not result.is_finite or not (sequence.record is None or sequence.record.is_finite):
            return [_fail(sequence, "the model gave logits that are not numbers")]
        held = result.prompt if span.decodes else ()
        if held or result.token_id is not None or result.is_exhausted:
            return [self._advance(sequence, held, result)]
        return self.finish_unsampled(sequence) if sequence.max_tokens == 0 else []

    def _advance(self, sequence: Sequence, held: Items[Scored], result: SampledSpan) -> Delta:
        """Take what a step gave, and what is forced behind it; return what can be shown now.

        held: forced tokens that waited for these scores; they come before what was drawn
        """
        report = self._reporter.report(sequence)
        token_ids: list[int] = []
        text = ""
        for scored in held:
            if not sequence.is_finished:
                sequence.num_held -= 1
                token_ids.append(scored.token_id)
                text += self._take(sequence, scored.token_id, scored, is_held=True)
        if result.is_exhausted and not sequence.is_finished:
            if sequence.matcher is None or not sequence.matcher.may_end:
                return _lose(sequence, _dead_end(sequence))
            text += self._finish(sequence, is_over=True, is_late=False, stop_token=None)
        if result.token_id is not None and not sequence.is_finished:
            sequence.token_ids.append(result.token_id)
            token_ids.append(result.token_id)
            text += self._take(sequence, result.token_id, result.scored)
            text += self._force(sequence, token_ids)
        sequence.shown.num_chars += len(text)
        return Delta(
            request_id=sequence.request.request_id,
            sample=sequence.sample,
            text=text,
            token_ids=tuple(token_ids),
            logprobs=self._shown_logprobs(sequence),
            prompt=report,
            finish=sequence.finish,
        )

    def _force(self, sequence: Sequence, token_ids: list[int]) -> str:
        """Append to the sequence, and to `token_ids`, what the constraint leaves no choice about; return its text.

        If log-probabilities are wanted, the next step computes them, and nothing of it is shown before.
        """
        text, waits = "", waits_for_scores(sequence)
        for _ in range(self._max_forced):
            token_id = None if sequence.is_finished else forced_token(sequence)
            if token_id is None or (waits and not hold(sequence, token_id)):
                break
            self.num_forced += 1
            steer_by_certainty(sequence)
            if not waits:
                sequence.token_ids.append(token_id)
                token_ids.append(token_id)
                text += self._take(sequence, token_id, certain_score(sequence, token_id))
        return text

    def _take(self, sequence: Sequence, token_id: int, scored: Scored | None, *, is_held: bool = False) -> str:
        """Carry constraint, text and stops on over the next token; return what can be shown of it.

        is_held: the constraint was carried on when it was appended
        """
        ends = self._ends(sequence, token_id)
        completes = not ends and not is_held and _completes(sequence, token_id)
        shows = not ends or self._shows_end(sequence, token_id)
        if scored is not None:
            detokenizer = sequence.shown.detokenizer
            offset = detokenizer.place_of(token_id) if shows else detokenizer.num_chars
            sequence.shown.logprobs.append(self._token_logprob(scored, offset))
        text = self._text(sequence, token_id) if shows else ""
        is_late = self._is_late(sequence, text)
        return text + self._finish(
            sequence, is_over=ends or completes, is_late=is_late, stop_token=token_id if ends else None
        )

    def _is_late(self, sequence: Sequence, text: str) -> bool:
        """Return whether the text has come to a line break after the time that it may take from its first token on."""
        limit_s = sequence.request.stop.max_predict_s
        if not limit_s:
            return False
        sequence.shown.first_token_at = sequence.shown.first_token_at or self._clock()
        return "\n" in text and self._clock() - sequence.shown.first_token_at > limit_s

    def _ends(self, sequence: Sequence, token_id: int) -> bool:
        """Return whether the token ends the sequence by itself; `_shows_end` says whether its text is shown then."""
        stop = sequence.request.stop
        return token_id in stop.token_ids or (token_id in self._eos_token_ids and not stop.ignore_eos)

    def _shows_end(self, sequence: Sequence, token_id: int) -> bool:
        """Return whether the text of the token that ends a sequence is shown.

        A stop token is shown if stops are kept, the model's own end token if special tokens are.
        """
        request = sequence.request
        if token_id in request.stop.token_ids:
            return request.stop.shows_string
        return not request.skips_special_tokens

    @staticmethod
    def _text(sequence: Sequence, token_id: int) -> str:
        """Return what the token lets be shown. Before `min_tokens`, stop strings are text like any other."""
        text = sequence.shown.detokenizer.feed(token_id)
        if sequence.num_taken < sequence.request.stop.min_tokens:
            return text
        return sequence.shown.ending.feed(text)

    @staticmethod
    def _finish(sequence: Sequence, *, is_over: bool, is_late: bool, stop_token: int | None) -> str:
        """End the sequence if it is time; return what was held back and can be shown now.

        is_over: a token or the constraint ends it;  stop_token: that token;  is_late: its time does
        """
        matcher = sequence.shown.ending
        text = ""
        is_long = is_late or sequence.num_taken >= sequence.max_tokens
        if (is_over or is_long) and matcher.matched is None:
            text = matcher.flush()
            # what is matched now waited for a stop that would begin earlier
        if matcher.matched is not None:
            sequence.end(FinishReason.STOP, matched_stop=matcher.matched)
        elif is_over:
            sequence.end(FinishReason.STOP, matched_stop=stop_token)
        elif is_long:
            sequence.end(FinishReason.LENGTH)
        return text

    @staticmethod
    def _shown_logprobs(sequence: Sequence) -> tuple[TokenLogprob, ...]:
        """Return log-probabilities of tokens whose text begins in what is shown; at the end all but a stop string's."""
        pending = sequence.shown.logprobs
        shown = sequence.shown.num_chars
        is_cut = sequence.shown.ending.matched is not None
        if sequence.is_finished and not is_cut:
            count = len(pending)
        else:
            count = next((i for i, entry in enumerate(pending) if entry.offset >= shown), len(pending))
        ready = tuple(pending[:count])
        del pending[:count]
        return ready

    def _note_prompt(self, span: Span, result: SampledSpan) -> None:
        """Keep the log-probabilities of prompt tokens that this step gave."""
        sequence = span.sequence
        if not result.prompt:
            return
        notes = sequence.shown.prompt_logprobs
        assert len(notes) == span.start, f"{sequence}: scored {len(notes)} positions of {span.start}"
        notes += [self._token_logprob(scored, 0) for scored in result.prompt]

    def _token_logprob(self, scored: Scored, offset: int) -> TokenLogprob:
        token_text = self._tokenizer.token_text
        return TokenLogprob(
            token_id=scored.token_id,
            text=token_text(scored.token_id),
            logprob=scored.logprob,
            offset=offset,
            top=tuple(TopLogprob(token_id=id_, text=token_text(id_), logprob=p) for id_, p in scored.top),
            rank=scored.rank,
        )


def _recorded(sequence: Sequence, deltas: list[Delta]) -> list[Delta]:
    """Return the deltas, the ends with what was recorded; completions of no token share their prompt's."""
    if sequence.record is None or not sequence.is_finished:
        return deltas
    recording = sequence.record.result()
    return [each if each.finish is None else replace(each, recording=recording) for each in deltas]


def _completes(sequence: Sequence, token_id: int) -> bool:
    """Carry a constraint on over the token; return whether nothing but the end may follow."""
    if sequence.matcher is None:
        return False
    sequence.matcher.advance(token_id)
    return sequence.matcher.is_complete


def _refusal(sequence: Sequence) -> ServeError | None:
    """Return why a constraint cannot be followed any further, if so."""
    if sequence.matcher is None or sequence.matcher.failure is None:
        return None
    name = _constraint_name(sequence)
    return InvalidRequest.refusing(
        name,
        must="take little work at every token",
        found=f"this behind what was generated: {sequence.matcher.failure}",
    )


def _dead_end(sequence: Sequence) -> ServeError:
    others = '"logit_bias", "bad_words", "min_tokens", "ignore_eos" and the vocabulary leave, too'
    if sequence.matcher is None:
        name = "allowed_token_ids" if sequence.request.sampling.allowed_token_ids else "logit_bias"
        return InvalidRequest.refusing(name, must=f"leave tokens that {others}", found="none behind what was generated")
    must = f'leave a way on by tokens that "allowed_token_ids", {others}'
    return InvalidRequest.refusing(_constraint_name(sequence), must=must, found="none where it is not satisfied yet")


def _constraint_name(sequence: Sequence) -> str:
    constraint = sequence.request.constraint
    return "" if constraint is None else constraint.name


def _fail(sequence: Sequence, message: str) -> Delta:
    return _lose(sequence, EngineFailed(message))


def _lose(sequence: Sequence, error: ServeError) -> Delta:
    sequence.end(FinishReason.ERROR)
    return Delta(request_id=sequence.request.request_id, sample=sequence.sample, error=error)


class Period:
    """A time span that is over at first.  clock: seconds, monotonic"""

    def __init__(self, clock: Callable[[], float], length_s: float) -> None:
        self._clock = clock
        self._length_s = length_s
        self._ends_at = 0.0

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._ends_at

    def begin(self) -> None:
        """Begin anew, over or not."""
        self._ends_at = self._clock() + self._length_s


class Coalescer:
    """Joins the deltas of completions that are answered whole, since each delta costs a router as much as a stream's.

    The first delta goes at once, the others together: when the completion ends, or a period is over, which is at the
    same step for all.

    clock: seconds, monotonic
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._period = Period(clock, PERIOD_S)
        self._is_due = True

    def begin(self) -> None:
        """Begin a step, whose deltas come now."""
        self._is_due = self._period.is_over
        if self._is_due:
            self._period.begin()

    def take(self, sequence: Sequence, deltas: list[Delta]) -> list[Delta]:
        """Return what is passed on of what it gained before and now: nothing or one delta, or an error behind it."""
        if not sequence.request.is_read_whole or len(deltas) != 1:
            return deltas
        (last,) = deltas
        gathered = [*sequence.shown.deltas, last]
        if not (self._is_due or last.prompt or last.finish or last.error):
            sequence.shown.deltas = gathered
            return []
        sequence.shown.deltas = []
        if last.error is None:
            return [joined(gathered)]
        return [joined(gathered[:-1]), last] if len(gathered) > 1 else [last]
