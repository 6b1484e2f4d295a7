"""Turns the events of a run into the response that a client reads, whole or in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from serve_app.api.chunks import TEXT_MARK, ChunkWriter, dump, dump_text, written_choice
from serve_app.api.completion import CompletionRequest
from serve_app.api.fragments import Fragment
from serve_app.api.logprobs import LegacyLogprobs
from serve_app.api.recordings import ShownRecording
from serve_app.api.responses import Choice, ResponseHead, completion_body, sglext_members, token_counts, usage_body
from serve_app.api.sse import DONE
from serve_app.core.delta import FinishReason, Usage
from serve_app.core.request import Recording
from serve_app.router.compose import Composer, Part
from serve_app.router.event import Event
from serve_app.router.ranking import Score, best_choices
from serve_app.router.run import Run
from serve_app.router.tally import Tally


class Shown(Protocol):
    """A choice of any kind of chunk."""

    @property
    def is_silent(self) -> bool: ...

    @property
    def index(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def recording(self) -> ShownRecording | None: ...

    def without_recording(self) -> Self: ...

    def with_text(self, text: str) -> Self: ...

    def recording_alone(self) -> Self:
        """The same choice with nothing else."""
        ...


Chosen = TypeVar("Chosen", bound=Shown)
ChosenOf = TypeVar("ChosenOf", bound=Shown, covariant=True)


class Composed(Protocol[ChosenOf]):
    """What one event adds to its choice."""

    @property
    def choice(self) -> ChosenOf: ...

    @property
    def part(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...


class Composes(Protocol[ChosenOf]):
    """Puts the deltas of a response in their places."""

    def add(self, event: Event) -> Sequence[Composed[ChosenOf]]: ...

    def is_text_alone(self, event: Event) -> bool:
        """Whether all that the event adds to its choice is its text as it stands, whatever came before; there is
        nothing to remember of it, then."""
        ...

    def prompt_tokens(self, part: int) -> int: ...


class StreamRenderer(Generic[Chosen]):
    """Writes the chunks of one response.

    tally: of the run whose events these are
    """

    def __init__(
        self, request: CompletionRequest, tally: Tally, *, composer: Composes[Chosen], writer: ChunkWriter[Chosen]
    ) -> None:
        self._request = request
        self._composer = composer
        self._writer = writer
        self._tally = tally
        self._num_finished = 0
        self._last: Chosen | None = None  # kept for the usage of the whole response, which it carries
        self._first_recording: Recording | None = None
        self._is_timed = request.has_timings and request.timings_per_token
        has_null = request.dialect.chunks_have_null_usage and request.stream_options.include_usage
        self._null_usage: dict[str, object] = {"usage": None} if has_null else {}
        self._around: dict[int, tuple[bytes, bytes]] = {}  # the text of a chunk that adds nothing else, by choice

    def chunks(self, event: Event) -> bytes:
        """The chunks that this event allows; nothing where it shows nothing. What was recorded comes by itself."""
        if not self._is_timed and self._composer.is_text_alone(event):
            return self._text_chunk(event)
        return b"".join(self._chunk(part) for part in self._composer.add(event) if not part.choice.is_silent)

    def _text_chunk(self, event: Event) -> bytes:
        """As for any other event, of which only the text is rendered anew."""
        if not event.delta.text:
            return b""
        around = self._around.get(event.index)
        if around is None:
            (part,) = self._composer.add(event)
            around = self._around[event.index] = self._writer.around(part.choice.with_text(TEXT_MARK), self._null_usage)
        before, behind = around
        return before + dump_text(event.delta.text) + behind

    def tail(self) -> bytes:
        """What follows the last choice."""
        chunks, usage = b"", self._tally.usage
        if self._last is not None:
            extras = {"usage": usage_body(usage), **self._extras(self._last)}
            chunks += self._writer.choice(self._last, extras)
        if extension := _sglext(self._request, usage, self._first_recording):
            chunks += self._writer.bare(extension | self._null_usage)
        if self._request.stream_options.include_usage:
            chunks += self._writer.bare({"usage": usage_body(usage)})
        return chunks + DONE

    def _chunk(self, part: Composed[Chosen]) -> bytes:
        choice, recording = part.choice.without_recording(), part.choice.recording
        chunk = self._chunk_of(choice, part)
        if recording is None:
            return chunk
        if choice.index == 0:
            self._first_recording = recording.recording
        return chunk + self._writer.choice(part.choice.recording_alone(), self._null_usage)

    def _chunk_of(self, choice: Chosen, part: Composed[Chosen]) -> bytes:
        self._num_finished += choice.finish_reason is not None
        if self._request.finish_chunk_has_usage and self._num_finished == self._request.num_choices:
            self._last = choice
            return b""
        extras = dict(self._null_usage)
        if self._request.has_continuous_usage:
            extras["usage"] = token_counts(self._composer.prompt_tokens(part.part), part.completion_tokens)
        return self._writer.choice(choice, extras | self._extras(choice))

    def _extras(self, choice: Chosen) -> dict[str, object]:
        """Timings: with every chunk where each token's are wanted, otherwise with the last of a choice."""
        is_timed = self._request.timings_per_token or choice.finish_reason is not None
        return {"timings": self._tally.timings.body()} if self._request.has_timings and is_timed else {}


def completion_renderer(request: CompletionRequest, head: ResponseHead, tally: Tally) -> StreamRenderer[Choice]:
    """Of the chunks of POST /v1/completions."""
    writer = ChunkWriter(head, written_choice)
    return StreamRenderer(request, tally, composer=Composer(request), writer=writer)


async def collect(run: Run, request: CompletionRequest, *, head: ResponseHead) -> dict[str, object] | Fragment:
    """Read a run to its end and build the whole body."""
    choices = await _choices(run, request)
    extras = whole_extras(run.tally, request, choices[0].recording)
    return await whole_body(
        lambda: completion_body(head, choices, usage=run.tally.usage, extras=extras), choices[0].recording
    )


async def whole_body(
    make: Callable[[], dict[str, object]], recording: ShownRecording | None
) -> dict[str, object] | Fragment:
    """The body; written already, beside the loop, where it has many numbers."""
    return make() if recording is None else await asyncio.to_thread(lambda: Fragment(dump(make())))


def whole_extras(tally: Tally, request: CompletionRequest, recording: ShownRecording | None) -> dict[str, object]:
    """Members of a whole body that were asked for; recording: of the first choice"""
    extras = _sglext(request, tally.usage, None if recording is None else recording.recording)
    if request.has_timings:
        extras["timings"] = tally.timings.body()
    return extras


def _sglext(request: CompletionRequest, usage: Usage, recording: Recording | None) -> dict[str, object]:
    return sglext_members(usage if request.return_cached_tokens_details else None, recording)


async def _choices(events: AsyncIterator[Event], request: CompletionRequest) -> list[Choice]:
    composer = Composer(request)
    parts: list[list[Part]] = [[] for _ in range(request.num_choices)]
    scores = [Score() for _ in parts]
    async for event in events:
        if request.is_ranked:
            scores[event.index].add(event)
        for part in composer.add(event):
            parts[part.choice.index].append(part)
    choices = [_joined(of_choice, request) for of_choice in parts]
    return best_choices(request, choices, scores) if request.is_ranked else choices


def _joined(parts: list[Part], request: CompletionRequest) -> Choice:
    logprobs = LegacyLogprobs() if request.logprobs is not None else None
    if logprobs is not None:
        for part in parts:
            if part.choice.logprobs is not None:
                logprobs.append(part.choice.logprobs)
    last = parts[-1].choice
    token_ids = None
    if request.return_token_ids:
        token_ids = tuple(token_id for part in parts for token_id in part.choice.token_ids or ())
    return Choice(
        index=last.index,
        text="".join(part.choice.text for part in parts),
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop,
        token_ids=token_ids,
        prompt_token_ids=parts[0].choice.prompt_token_ids,
        prompt_logprobs=parts[0].choice.prompt_logprobs,
        has_stop_reason=last.has_stop_reason,
        stop_reason=last.stop_reason,
        model=last.model,
        tool_calls=last.tool_calls,
        recording=last.recording,
    )
