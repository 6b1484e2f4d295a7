"""What is said of a prompt, once: its length, what of it was cached or cut, its echo, its log-probabilities."""

from __future__ import annotations

from dataclasses import replace

from serve_app.core.delta import PromptReport, TokenLogprob
from serve_app.engine.sequence import Sequence
from serve_app.text.tokenizer import TextTokenizer

NUM_TAIL_TOKENS = 16


class PromptReporter:
    """Reports the prompt of a request with the first delta of its first sample."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def report(self, sequence: Sequence) -> PromptReport | None:
        """What is to be said now; None where it was said, or is another sample's to say."""
        if sequence.sample != 0 or sequence.was_reported:
            return None
        request = sequence.request
        prompt_ids = sequence.token_ids[: sequence.prompt_length]
        wanted, scored, logprobs = request.logprobs, None, None
        if wanted is not None and wanted.scores_prompt:
            scored = self._placed(prompt_ids, sequence.prompt_logprobs)
            logprobs = _shown(scored, sequence.shown_prompt) if wanted.prompt else None
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
            whole_logprobs=scored if wanted is not None and wanted.whole_prompt is not None else None,
            token_ids=tuple(prompt_ids) if request.reports_prompt_ids else None,
            unenforced_formats=() if sequence.matcher is None else sequence.matcher.formats,
            tail=self._tokenizer.untokenize(prompt_ids[-NUM_TAIL_TOKENS:]) if request.reports_tail else "",
        )

    def _echoed(self, sequence: Sequence) -> str:
        """The prompt as it was written where it was text and is echoed whole, else what its tokens mean."""
        request = sequence.request
        prompt_ids = [sequence.token_ids[place] for place in sequence.shown_prompt]
        if request.echo_last:
            first = max(0, len(prompt_ids) - request.echo_last)
            before = self._tokenizer.decode(prompt_ids[:first])
            return self._tokenizer.decode(prompt_ids)[len(before) :]
        return request.prompt.text or self._tokenizer.decode(prompt_ids)

    def _placed(self, prompt_ids: list[int], scored: list[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Give each prompt token its place in the text; nothing predicts the first."""
        detokenizer = self._tokenizer.detokenizer([])
        first = TokenLogprob(
            token_id=prompt_ids[0], text=self._tokenizer.token_text(prompt_ids[0]), logprob=None, offset=0
        )
        placed = []
        for entry in (first, *scored):
            placed.append(replace(entry, offset=detokenizer.num_chars))
            detokenizer.feed(entry.token_id)
        return tuple(placed)


def _shown(logprobs: tuple[TokenLogprob, ...], places: range) -> tuple[TokenLogprob, ...]:
    """Those at these places, with offsets that count from the first of them."""
    kept = logprobs[places.start : places.stop]
    return tuple(replace(entry, offset=entry.offset - kept[0].offset) for entry in kept)


def _last(logprobs: tuple[TokenLogprob, ...] | None, count: int) -> tuple[TokenLogprob, ...] | None:
    """The last so many, with offsets that count from the first of them; 0 is all."""
    if not count or not logprobs:
        return logprobs
    kept = logprobs[-count:]
    return tuple(replace(entry, offset=entry.offset - kept[0].offset) for entry in kept)
