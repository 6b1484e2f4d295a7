"""From sampled tokens to deltas: append, detect the end, detokenize, match stops."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

from serve_app.core.delta import Delta, Finish, FinishReason, PromptReport, TokenLogprob, TopLogprob
from serve_app.core.errors import EngineFailed
from serve_app.engine.batch import Batch, Span
from serve_app.engine.sampling.logprobs import Scored
from serve_app.engine.sampling.sampler import SampledSpan
from serve_app.engine.sequence import Sequence
from serve_app.text.tokenizer import TextTokenizer


class Output:
    """Turns what a step gave into deltas. Changes sequences; does not release anything."""

    def __init__(self, tokenizer: TextTokenizer, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids

    def commit(self, batch: Batch, sampled: Items[SampledSpan]) -> list[Delta]:
        """Carry a step's results into its sequences; return what each gained."""
        deltas = []
        for span, result in zip(batch.spans, sampled, strict=True):
            sequence = span.sequence
            sequence.num_computed = span.end
            self._note_prompt(span, result)
            if not sequence.is_prompt_computed:
                continue
            if not result.is_finite:
                deltas.append(_fail(sequence, EngineFailed("the model gave logits that are not numbers")))
            elif result.token_id is not None:
                deltas.append(self._advance(sequence, result.token_id, result.scored))
            elif sequence.max_tokens == 0:
                deltas += self.finish_unsampled(sequence)
        return deltas

    def finish_unsampled(self, sequence: Sequence) -> list[Delta]:
        """End a request for which nothing is to be generated, its siblings with it."""
        deltas = []
        for one in (sequence, *sequence.siblings):
            report = self._report_prompt(one)
            one.finish = Finish(reason=FinishReason.LENGTH, matched_stop=None, num_tokens=0)
            deltas.append(Delta(request_id=one.request.request_id, sample=one.sample, prompt=report, finish=one.finish))
        sequence.siblings = []
        return deltas

    def _advance(self, sequence: Sequence, token_id: int, scored: Scored | None) -> Delta:
        """Append a token and say what can be shown now."""
        report = self._report_prompt(sequence)
        sequence.token_ids.append(token_id)
        ends = self._ends(sequence, token_id)
        if scored is not None:  # also of a token that is not shown: it was generated, and `usage` counts it
            sequence.pending_logprobs.append(self._token_logprob(scored, sequence.detokenizer.num_chars))
        text = ""
        if not ends or self._shows_end(sequence, token_id):
            text = self._text(sequence, token_id)
        finish = self._finish(sequence, token_id, ends=ends)
        if finish is not None and sequence.stop_matcher.matched is None:
            text += sequence.stop_matcher.feed(sequence.detokenizer.flush())
            text += sequence.stop_matcher.flush()
            if sequence.stop_matcher.matched is not None:  # it waited for a stop that would begin earlier
                finish = self._stopped(sequence)
        sequence.finish = finish
        sequence.num_shown_chars += len(text)
        return Delta(
            request_id=sequence.request.request_id,
            sample=sequence.sample,
            text=text,
            token_ids=(token_id,),
            logprobs=self._shown_logprobs(sequence),
            prompt=report,
            finish=finish,
        )

    def _ends(self, sequence: Sequence, token_id: int) -> bool:
        """Whether the token ends the sequence by itself; `_shows_end` says whether its text is shown then."""
        stop = sequence.request.stop
        return token_id in stop.token_ids or (token_id in self._eos_token_ids and not stop.ignore_eos)

    def _shows_end(self, sequence: Sequence, token_id: int) -> bool:
        """Whether the text of the token that ends it is shown: of a stop token where stops are kept, of the model's own
        end token where special tokens are."""
        request = sequence.request
        if token_id in request.stop.token_ids:
            return request.stop.shows_string
        return not request.skips_special_tokens

    @staticmethod
    def _text(sequence: Sequence, token_id: int) -> str:
        """What the token lets be shown. Before the least number of tokens, stop strings are text like any other."""
        text = sequence.detokenizer.feed(token_id)
        if sequence.num_generated < sequence.request.stop.min_tokens:
            return text
        return sequence.stop_matcher.feed(text)

    def _finish(self, sequence: Sequence, token_id: int, *, ends: bool) -> Finish | None:
        if ends:
            return Finish(reason=FinishReason.STOP, matched_stop=token_id, num_tokens=sequence.num_generated)
        if sequence.stop_matcher.matched is not None:
            return self._stopped(sequence)
        if sequence.num_generated >= sequence.max_tokens:
            wanted = sequence.request.stop.max_tokens
            return Finish(
                reason=FinishReason.LENGTH,
                matched_stop=None,
                num_tokens=sequence.num_generated,
                is_context_end=wanted is None or sequence.num_generated < wanted,
            )
        return None

    @staticmethod
    def _stopped(sequence: Sequence) -> Finish:
        matched = sequence.stop_matcher.matched
        return Finish(reason=FinishReason.STOP, matched_stop=matched, num_tokens=sequence.num_generated)

    @staticmethod
    def _shown_logprobs(sequence: Sequence) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of tokens whose text begins in what is shown; at the end all but those of a stop string."""
        pending = sequence.pending_logprobs
        shown = sequence.num_shown_chars
        is_cut = sequence.stop_matcher.matched is not None
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
        notes = sequence.prompt_logprobs
        assert len(notes) == span.start, f"{sequence}: scored {len(notes)} positions of {span.start}"
        notes += [self._token_logprob(scored, 0) for scored in result.prompt]

    def _report_prompt(self, sequence: Sequence) -> PromptReport | None:
        """What is to be said of the prompt with the first delta of its first sample."""
        if sequence.sample != 0 or sequence.was_reported:
            return None
        request = sequence.request
        prompt_ids = sequence.token_ids[: sequence.prompt_length]
        logprobs = None
        if request.logprobs is not None and request.logprobs.prompt:
            logprobs = self._prompt_logprobs(prompt_ids, sequence.prompt_logprobs)
        text = None
        if request.echo:
            text = self._echoed(sequence)
            logprobs = _last(logprobs, request.echo_last)
        sequence.was_reported = True
        sequence.prompt_logprobs = []
        return PromptReport(
            num_tokens=sequence.prompt_length,
            num_cached_tokens=sequence.num_cached_tokens,
            num_dropped_tokens=sequence.num_dropped_tokens,
            queue_s=max(0.0, (sequence.started_at or sequence.arrived_at) - sequence.arrived_at),
            text=text,
            logprobs=logprobs,
            token_ids=tuple(prompt_ids) if request.reports_prompt_ids else None,
        )

    def _echoed(self, sequence: Sequence) -> str:
        """The prompt as it was written where it was text and is echoed whole, else what its tokens mean."""
        request = sequence.request
        prompt_ids = sequence.token_ids[: sequence.prompt_length]
        if request.echo_last:
            first = max(0, len(prompt_ids) - request.echo_last)
            before = self._tokenizer.decode(prompt_ids[:first])
            return self._tokenizer.decode(prompt_ids)[len(before) :]
        return request.prompt.text or self._tokenizer.decode(prompt_ids)

    def _prompt_logprobs(self, prompt_ids: list[int], scored: list[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Give each prompt token its place in the text; nothing predicts the first."""
        detokenizer = self._tokenizer.detokenizer([])
        first = TokenLogprob(
            token_id=prompt_ids[0], text=self._tokenizer.token_text(prompt_ids[0]), logprob=None, offset=0
        )
        placed = []
        for entry in (first, *scored):
            placed.append(
                TokenLogprob(
                    token_id=entry.token_id,
                    text=entry.text,
                    logprob=entry.logprob,
                    offset=detokenizer.num_chars,
                    top=entry.top,
                )
            )
            detokenizer.feed(entry.token_id)
        return tuple(placed)

    def _token_logprob(self, scored: Scored, offset: int) -> TokenLogprob:
        token_text = self._tokenizer.token_text
        return TokenLogprob(
            token_id=scored.token_id,
            text=token_text(scored.token_id),
            logprob=scored.logprob,
            offset=offset,
            top=tuple(TopLogprob(token_id=id_, text=token_text(id_), logprob=p) for id_, p in scored.top),
        )


def _last(logprobs: tuple[TokenLogprob, ...] | None, count: int) -> tuple[TokenLogprob, ...] | None:
    """The last so many, with offsets that count from the first of them; 0 is all."""
    if not count or not logprobs:
        return logprobs
    kept = logprobs[-count:]
    return tuple(replace(entry, offset=entry.offset - kept[0].offset) for entry in kept)


def _fail(sequence: Sequence, error: EngineFailed) -> Delta:
    sequence.finish = Finish(reason=FinishReason.ERROR, matched_stop=None, num_tokens=sequence.num_generated)
    return Delta(request_id=sequence.request.request_id, sample=sequence.sample, error=error)
