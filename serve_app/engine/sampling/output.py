"""Output: what a step drew becomes deltas. For each span `commit`

1. notes what is computed, and scores of prompt tokens;
2. appends the drawn token, and those that the constraint forces behind it;
3. carries constraint, text and stops on, and ends the sequence where it is time;
4. makes one delta of what can be shown now, which waits if its client reads nothing before the end.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

from serve_app.core.delta import Delta, FinishReason, PromptReport, TokenLogprob, TopLogprob, joined
from serve_app.core.errors import EngineFailed, InvalidRequest, ServeError
from serve_app.core.log_context import about
from serve_app.engine.sampling.sampler import SampledSpan, Scored
from serve_app.engine.sampling.stages import steer
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span
from serve_app.text.tokenizer import TextTokenizer, meant_places, written_places

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
                    failure = _lose(span.sequence, EngineFailed("the engine failed to take over what it had computed"))
                    deltas += self._coalescer.take(span.sequence, [failure])
        return deltas

    def go_on(self, sequence: Sequence) -> None:
        """Take over what was generated of a new sequence elsewhere, and let nothing of it be told again.

        It is left as one that was preempted: its tokens are there, and have to be computed. Any thread may ask.
        """
        request = sequence.request
        sequence.shown.is_prompt_reported = sequence.spent.is_prompt_counted = request.is_reported
        continued = request.continued[sequence.sample] if request.continued else None
        if continued is None:
            return
        sequence.shown.first_token_at = math.inf  # none of these is late: they were told
        for token_id in continued.token_ids:
            if sequence.is_finished:
                raise EngineFailed("the completion that was begun elsewhere ends before its last token")
            sequence.token_ids.append(token_id)
            sequence.shown.num_chars += len(self._take(sequence, token_id, None))
        sequence.shown.first_token_at = self._clock() if continued.token_ids else None
        if continued.mu is not None:
            sequence.sampling_state.mu = continued.mu
        sequence.spent.num_counted = max(continued.num_counted, sequence.num_taken)
        sequence.spent.is_prompt_counted |= bool(continued.num_counted)

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
            return [_lose(sequence, EngineFailed("the model gave logits that are not numbers"))]
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
            mu=sequence.sampling_state.mu if sequence.request.sampling.mirostat else None,
        )

    def _force(self, sequence: Sequence, token_ids: list[int]) -> str:
        """Append to the sequence, and to `token_ids`, what the constraint leaves no choice about; return its text.

        If log-probabilities are wanted, the next step computes them, and nothing of it is shown before.
        """
        wanted, text = sequence.request.logprobs, ""
        num_top = None if wanted is None else wanted.top
        waits = wanted is not None and num_top is not None and not wanted.post_sampling
        for _ in range(self._max_forced):
            token_id = None if sequence.is_finished else forced_token(sequence)
            if token_id is None or (waits and not hold(sequence, token_id)):
                break
            self.num_forced += 1
            steer(sequence, 1.0)
            if not waits:
                sequence.token_ids.append(token_id)
                token_ids.append(token_id)
                certain = None if num_top is None else Scored(token_id, 0.0, ((token_id, 0.0),) if num_top else ())
                text += self._take(sequence, token_id, certain)
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


def _lose(sequence: Sequence, error: ServeError) -> Delta:
    sequence.end(FinishReason.ERROR)
    return Delta(request_id=sequence.request.request_id, sample=sequence.sample, error=error)


class Period:
    """Measures a time span, which is over at first.  clock: seconds, monotonic"""

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


NUM_TAIL_TOKENS = 16


class PromptReporter:
    """Reports a request's prompt once, with the first delta of its first sample."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def report(self, sequence: Sequence) -> PromptReport | None:
        """Return the report; None if it was given, or is another sample's to give."""
        if sequence.sample != 0 or sequence.shown.is_prompt_reported:
            return None
        request = sequence.request
        prompt_ids = sequence.token_ids[: sequence.prompt_length]
        wanted, scored, logprobs = request.logprobs, None, None
        if wanted is not None and wanted.scores_prompt:
            scored = self._scored(prompt_ids, sequence.shown.prompt_logprobs)
            logprobs = self._placed(sequence, scored) if wanted.prompt else None
        text = self._echoed(sequence) if request.echo else None
        sequence.shown.is_prompt_reported = True
        sequence.shown.prompt_logprobs = []
        return PromptReport(
            num_tokens=sequence.prompt_length,
            num_cached_tokens=sequence.place.num_cached_tokens,
            num_dropped_tokens=sequence.shown.num_dropped_tokens,
            queue_s=max(0.0, (sequence.place.started_at or sequence.place.arrived_at) - sequence.place.arrived_at),
            text=text,
            logprobs=logprobs,
            whole_logprobs=scored if wanted is not None and wanted.whole_prompt is not None else None,
            token_ids=tuple(prompt_ids) if request.reports_prompt_ids else None,
            unenforced_formats=() if sequence.matcher is None else sequence.matcher.formats,
            tail=self._tokenizer.untokenize(prompt_ids[-NUM_TAIL_TOKENS:]) if request.reports_tail else "",
        )

    def _echoed(self, sequence: Sequence) -> str:
        """Return the prompt as it was written if it was text and is echoed whole, else what its tokens mean."""
        written = _written(sequence)
        if written is not None:
            return written
        shown = sequence.shown.prompt
        prompt_ids = sequence.token_ids[shown.start : shown.stop]
        return self._meaning(sequence, prompt_ids)[self._num_cut(sequence, prompt_ids) :]

    def _scored(self, prompt_ids: list[int], scored: list[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Return the scores of all tokens; nothing predicts the first."""
        text = self._tokenizer.token_text(prompt_ids[0])
        return (TokenLogprob(token_id=prompt_ids[0], text=text, logprob=None, offset=0), *scored)

    def _placed(self, sequence: Sequence, scored: Items[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Return each echoed token with its offset in the echo; one that goes on with a cut character is at 0."""
        shown = scored[sequence.shown.prompt.start : sequence.shown.prompt.stop]
        prompt_ids = [entry.token_id for entry in shown]
        places = self._places(sequence, prompt_ids)
        placed = [replace(entry, offset=place) for entry, place in zip(shown, places, strict=True)]
        return tuple(placed[-sequence.request.echo_last :])  # 0 is all

    def _places(self, sequence: Sequence, prompt_ids: list[int]) -> list[int]:
        """Return how many characters of the echo stand before each token of the prompt."""
        request, written = sequence.request, _written(sequence)
        if written is None:
            num_cut = self._num_cut(sequence, prompt_ids)
            places = meant_places(self._tokenizer, prompt_ids, shows_special=not request.skips_special_tokens)
            return [max(0, place - num_cut) for place in places]
        has_prefix = request.infill is None and request.prompt.adds_special  # of a gap it is not shown
        num_prefixed = len(self._tokenizer.prefix_ids) if has_prefix else 0
        return [0] * num_prefixed + written_places(self._tokenizer, written, prompt_ids[num_prefixed:])

    def _num_cut(self, sequence: Sequence, prompt_ids: list[int]) -> int:
        """Return how many characters begin before the last tokens, if only those are echoed."""
        count = sequence.request.echo_last
        return len(self._meaning(sequence, prompt_ids[:-count])) if count else 0

    def _meaning(self, sequence: Sequence, token_ids: list[int]) -> str:
        """Return the text of tokens, special ones by their names if the completion shows them, too."""
        skips = sequence.request.skips_special_tokens
        return self._tokenizer.decode(token_ids) if skips else self._tokenizer.untokenize(token_ids)


def _written(sequence: Sequence) -> str | None:
    """Return the prompt as it was written, if it was text and is echoed whole."""
    request = sequence.request
    return None if request.echo_last else request.prompt.text


def forced_token(sequence: Sequence) -> int | None:
    """Return the only token that the constraint allows now, if nothing else forbids it; else the sampler decides."""
    matcher = sequence.matcher
    if matcher is None or matcher.failure is not None:
        return None
    token_id = matcher.forced
    return None if token_id is None or _is_forbidden(sequence, token_id) else token_id


def hold(sequence: Sequence, token_id: int) -> bool:
    """Append a forced token whose score is waited for.

    Return False, and change nothing, if a drawn token has to be the last: the text, or what may be generated, ends with
    it.
    """
    matcher = sequence.matcher
    assert matcher is not None, f"{sequence} is not constrained"
    if sequence.num_generated + 1 >= sequence.max_tokens:
        return False
    matcher.advance(token_id)
    if matcher.is_complete or matcher.failure is not None:
        matcher.go_back(1)
        return False
    sequence.token_ids.append(token_id)
    sequence.num_held += 1
    return True


def _is_forbidden(sequence: Sequence, token_id: int) -> bool:
    """Return whether bans and the like forbid a token; asked for every forced token, so in constant time."""
    state, stop = sequence.sampling_state, sequence.request.stop
    bad_words = state.bad_words
    if state.allowed and token_id not in state.allowed:
        return True
    if sequence.num_generated < stop.min_tokens and token_id in stop.token_ids:
        return True
    if token_id in state.biased:
        return True  # a ban, or what is as good as one
    if bad_words is None:
        return False
    return token_id in bad_words.completions(sequence.token_ids, num_generated=sequence.num_generated)
