"""Reports a prompt: its length, what was cached or cut, its echo, its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

from serve_app.core.delta import PromptReport, TokenLogprob
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.text.offsets import meant_places, written_places
from serve_app.text.tokenizer import TextTokenizer

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
