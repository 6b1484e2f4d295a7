"""Turns the events of a run into the response that a client reads, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from serve_app.api.chunks import ChunkWriter
from serve_app.api.completion import CompletionRequest
from serve_app.api.logprobs import LegacyLogprobs
from serve_app.api.responses import Choice, ResponseHead, completion_body
from serve_app.api.sse import DONE
from serve_app.core.delta import Finish, PromptReport, Usage
from serve_app.router.run import Event, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one event adds to its choice, the echoed prompt in front where it is the first."""

    choice: Choice
    prompt_index: int
    completion_tokens: int

    @property
    def is_silent(self) -> bool:
        return not self.choice.text and self.choice.logprobs is None and self.choice.finish_reason is None


class Composer:
    """Puts echoed prompts in front and moves offsets behind them.

    An event that comes before the report of its prompt is kept until the report is there, where it matters.
    """

    def __init__(self, request: CompletionRequest) -> None:
        self._echo = request.echo
        self._wants_logprobs = request.logprobs is not None
        self._needs_report = request.echo or request.stream_options.continuous_usage_stats
        self._reports: dict[int, PromptReport] = {}
        self._kept: dict[int, list[Event]] = {}
        self._completion_tokens: dict[int, int] = {}

    def add(self, event: Event) -> list[Part]:
        """The parts that can be shown now, in the order of each choice."""
        if event.delta.prompt is not None:
            self._reports[event.prompt_index] = event.delta.prompt
            return [self._part(e) for e in (*self._kept.pop(event.prompt_index, ()), event)]
        if self._needs_report and event.prompt_index not in self._reports:
            self._kept.setdefault(event.prompt_index, []).append(event)
            return []
        return [self._part(event)]

    def prompt_tokens(self, prompt_index: int) -> int:
        return self._reports[prompt_index].num_tokens

    def _part(self, event: Event) -> Part:
        delta, index = event.delta, event.index
        is_first = index not in self._completion_tokens
        text, shift = delta.text, 0
        logprobs = LegacyLogprobs()
        if self._echo:
            report = self._reports[event.prompt_index]
            prompt_text = report.text or ""
            shift = len(prompt_text)
            if is_first:
                text = prompt_text + text
                logprobs.extend(report.logprobs or ())
        logprobs.extend(delta.logprobs, shift=shift)
        return Part(
            choice=Choice(
                index=index,
                text=text,
                logprobs=logprobs if self._wants_logprobs and logprobs.tokens else None,
                finish_reason=None if delta.finish is None else delta.finish.reason,
                matched_stop=None if delta.finish is None else delta.finish.matched_stop,
            ),
            prompt_index=event.prompt_index,
            completion_tokens=self._count(index, len(delta.token_ids), delta.finish),
        )

    def _count(self, index: int, num_new: int, finish: Finish | None) -> int:
        """Tokens of the choice so far; the finish knows also those that no delta carried."""
        num_tokens = self._completion_tokens.get(index, 0) + num_new
        self._completion_tokens[index] = num_tokens if finish is None else finish.num_tokens
        return self._completion_tokens[index]


class StreamRenderer:
    """Writes the chunks of one response."""

    def __init__(self, request: CompletionRequest, head: ResponseHead) -> None:
        self._options = request.stream_options
        self._composer = Composer(request)
        self._writer = ChunkWriter(head)

    def chunks(self, event: Event) -> bytes:
        """The chunks that this event allows; nothing where it shows nothing."""
        return b"".join(self._chunk(part) for part in self._composer.add(event) if not part.is_silent)

    def tail(self, usage: Usage) -> bytes:
        """What follows the last choice."""
        return (self._writer.usage(usage) if self._options.include_usage else b"") + DONE

    def _chunk(self, part: Part) -> bytes:
        if not self._options.continuous_usage_stats:
            return self._writer.choice(part.choice)
        return self._writer.choice_with_usage(
            part.choice,
            prompt_tokens=self._composer.prompt_tokens(part.prompt_index),
            completion_tokens=part.completion_tokens,
        )


async def collect(run: Run, request: CompletionRequest, *, head: ResponseHead) -> dict[str, object]:
    """Read a run to its end and build the whole body."""
    return completion_body(head, await _choices(run, request), usage=run.usage)


async def _choices(events: AsyncIterator[Event], request: CompletionRequest) -> list[Choice]:
    composer = Composer(request)
    parts: list[list[Part]] = [[] for _ in range(request.num_choices)]
    async for event in events:
        for part in composer.add(event):
            parts[part.choice.index].append(part)
    return [_joined(of_choice, wants_logprobs=request.logprobs is not None) for of_choice in parts]


def _joined(parts: list[Part], *, wants_logprobs: bool) -> Choice:
    logprobs = LegacyLogprobs() if wants_logprobs else None
    if logprobs is not None:
        for part in parts:
            if part.choice.logprobs is not None:
                logprobs.append(part.choice.logprobs)
    last = parts[-1].choice
    return Choice(
        index=last.index,
        text="".join(part.choice.text for part in parts),
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop,
    )
