"""Puts the deltas of a response in their places: prompts in front, offsets behind them, a suffix at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from serve_app.api.completion import CompletionRequest
from serve_app.api.logprobs import LegacyLogprobs, ranked_body
from serve_app.api.recordings import ShownRecording
from serve_app.api.responses import Choice
from serve_app.core.delta import Delta, PromptReport, TokenLogprob
from serve_app.core.prompt import SuffixMode
from serve_app.router.calling import CallReader
from serve_app.router.event import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one event adds to its choice, the echoed prompt in front where it is the first.

    part: of the request, as the event has it
    """

    choice: Choice
    part: int
    completion_tokens: int
    is_context_end: bool


class Composer:
    """Puts echoed prompts in front, moves offsets behind them, and ends each choice with the suffix that it shows.

    An event that comes before the report of its prompt is kept until the report is there, where it matters.
    """

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._echo = request.echo or request.echo_last > 0
        self._wants_logprobs = request.logprobs is not None
        self._wants_ids = request.return_token_ids
        self._wants_scores = request.prompt_logprobs is not None
        self._needs_report = self._echo or self._wants_ids or self._wants_scores or request.has_continuous_usage
        shows_suffix = request.suffix_mode is SuffixMode.APPEND or request.echo
        self._suffix = (request.suffix or "") if shows_suffix else ""
        self._reports: dict[int, PromptReport] = {}
        self._kept: dict[int, list[Event]] = {}
        self._has_begun: set[int] = set()
        self._calls = CallReader(request.tool_use)
        wants_more = self._needs_report or self._wants_logprobs or bool(request.tool_use.names)
        self._shows_text_alone = not wants_more

    def add(self, event: Event) -> list[Part]:
        """The parts that can be shown now, in the order of each choice."""
        if event.delta.prompt is not None:
            self._reports[event.part] = event.delta.prompt
            return [part for e in (*self._kept.pop(event.part, ()), event) for part in self._parts(e)]
        if self._needs_report and event.part not in self._reports:
            self._kept.setdefault(event.part, []).append(event)
            return []
        return self._parts(event)

    def is_text_alone(self, event: Event) -> bool:
        """Whether all that the event adds to its choice is its text, and nothing has to be remembered of it."""
        return self._shows_text_alone and event.delta.is_bare

    def prompt_tokens(self, part: int) -> int:
        return self._reports[part].num_tokens

    def is_prompt_cut(self, part: int) -> bool:
        """Whether the prompt lost its beginning to the context."""
        return self._reports[part].num_dropped_tokens > 0

    def _parts(self, event: Event) -> list[Part]:
        """A suffix goes out before the end of its choice, so that what only ends a choice shows no text."""
        part = self._part(event)
        choice = part.choice
        if not self._suffix or choice.finish_reason is None:
            return [part]
        text = replace(choice, text=choice.text + self._suffix, finish_reason=None, matched_stop=None, tool_calls=())
        end = Choice(
            index=choice.index,
            text="",
            finish_reason=choice.finish_reason,
            matched_stop=choice.matched_stop,
            token_ids=() if self._wants_ids else None,
            model=choice.model,
            tool_calls=choice.tool_calls,
        )
        return [replace(part, choice=text, is_context_end=False), replace(part, choice=end)]

    def _part(self, event: Event) -> Part:
        delta, index = event.delta, event.index
        is_first = index not in self._has_begun
        self._has_begun.add(index)
        text, shift = delta.text, 0
        logprobs = LegacyLogprobs()
        if self._echo:
            report = self._reports[event.part]
            prompt_text = report.text or ""
            shift = len(prompt_text)
            if is_first:
                text = prompt_text + text
                self._extend(logprobs, report.logprobs or ())
        self._extend(logprobs, delta.logprobs, shift=shift)
        self._calls.note(index, delta.text)
        choice = Choice(
            index=index,
            text=text,
            logprobs=logprobs if self._wants_logprobs and logprobs.tokens else None,
            finish_reason=None if delta.finish is None else delta.finish.reason,
            matched_stop=None if delta.finish is None else delta.finish.matched_stop,
            has_stop_reason=self._request.dialect.has_stop_reason,
            stop_reason=stop_reason_of(delta, self._request),
            token_ids=delta.token_ids if self._wants_ids else None,
            prompt_token_ids=self._reports[event.part].token_ids if self._wants_ids and is_first else None,
            prompt_logprobs=self._scores(event.part) if is_first else None,
            model=self._request.listed_model_of(event.part),
            recording=shown_recording(delta, self._request),
        )
        return Part(
            choice=choice if delta.finish is None else self._calls.finished(choice),
            part=event.part,
            completion_tokens=event.completion_tokens,
            is_context_end=delta.finish is not None and delta.finish.is_context_end,
        )

    def _extend(self, logprobs: LegacyLogprobs, entries: Iterable[TokenLogprob], *, shift: int = 0) -> None:
        request = self._request
        logprobs.extend(entries, shift=shift, num_top=request.logprobs, by_id=request.return_tokens_as_token_ids)

    def _scores(self, part: int) -> list[dict[str, object] | None] | None:
        """vLLM's log-probabilities of the prompt, where they are wanted."""
        num_top = self._request.prompt_logprobs
        return None if num_top is None else ranked_body(self._reports[part].whole_logprobs or (), num_top)


def stop_reason_of(delta: Delta, request: CompletionRequest) -> str | int | None:
    """What vLLM calls so: not the model's own end."""
    matched = None if delta.finish is None else delta.finish.matched_stop
    return matched if isinstance(matched, str) or matched in request.stop_token_ids else None


def shown_recording(delta: Delta, request: CompletionRequest) -> ShownRecording | None:
    """What was recorded of a choice, as this request wants to see it; None where nothing was."""
    if delta.recording is None:
        return None
    return ShownRecording(recording=delta.recording, is_flat=request.shows_last_state)
