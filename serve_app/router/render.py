"""Turns the events of a run into the response that a client reads, whole or in chunks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import BestOf
from serve_app.api.logprobs import LegacyLogprobs, ShownRecording, ranked_body
from serve_app.api.responses import (
    OBJECT,
    TEXT_MARK,
    ChatChoice,
    Choice,
    ChunkWriter,
    ResponseHead,
    completion_body,
    sglext_members,
    token_counts,
    usage_body,
    written_choice,
)
from serve_app.api.sse import DONE, Fragment, dump, dump_text
from serve_app.core.delta import PromptReport, Recording, TokenLogprob, Usage
from serve_app.core.progress import before, behind
from serve_app.core.prompt import SuffixMode
from serve_app.router.inbox import Event
from serve_app.router.message import CallReader
from serve_app.router.places import Places, Seen, SeenChoice
from serve_app.router.run import Run
from serve_app.router.stats import RunStats

Chosen = TypeVar("Chosen", Choice, ChatChoice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Generic[Chosen]):
    """What one event adds to its choice, the echoed prompt in front where it is the first.

    part: of the request, as the event has it
    begins: it comes before anything that the event brings
    """

    choice: Chosen
    part: int
    completion_tokens: int
    is_context_end: bool = False
    begins: bool = False


class EventComposer(ABC, Generic[Chosen]):
    """Makes parts of a response from events.

    An event that comes before the report of its prompt is kept until the report is there, where it matters.

    needs_report: whether it matters, whatever the model is
    """

    def __init__(self, request: CompletionRequest, *, needs_report: bool) -> None:
        self._needs_report = needs_report
        self._request = request
        self._reports: dict[int, PromptReport] = {}
        self._kept: dict[int, list[Event]] = {}

    def add(self, event: Event) -> list[Part[Chosen]]:
        """Return the parts that can be shown now, in the order of each choice."""
        return [part for _, parts in self.by_event(event) for part in parts]

    def by_event(self, event: Event) -> list[tuple[Event, list[Part[Chosen]]]]:
        """Return the events that can be shown now, each with its parts."""
        if event.delta.prompt is not None:
            self._reports[event.part] = event.delta.prompt
            return [(each, self._parts(each)) for each in (*self._kept.pop(event.part, ()), event)]
        if event.part not in self._reports and self._awaits_report(event.part):
            self._kept.setdefault(event.part, []).append(event)
            return []
        return [(event, self._parts(event))]

    def prompt_tokens(self, part: int) -> int:
        return self._reports[part].num_tokens

    @abstractmethod
    def is_text_alone(self, event: Event) -> bool:
        """Return whether all that the event adds to its choice is its text, and nothing has to be remembered of it."""

    def _awaits_report(self, part: int) -> bool:
        return self._needs_report

    @abstractmethod
    def _parts(self, event: Event) -> list[Part[Chosen]]: ...

    def _common(self, event: Event) -> dict[str, Any]:
        """Return the fields that choices of every kind take from an event."""
        request, delta = self._request, event.delta
        matched = None if delta.finish is None else delta.finish.matched_stop
        is_told = isinstance(matched, str) or matched in request.stop_token_ids  # not the model's own end
        recording, flat = delta.recording, request.shows_last_state
        return {
            "index": event.index,
            "model": request.listed_model_of(event.part),
            "matched_stop": matched,
            "has_stop_reason": request.dialect.has_stop_reason,
            "stop_reason": matched if is_told else None,
            "token_ids": delta.token_ids if request.return_token_ids else None,
            "recording": None if recording is None else ShownRecording(recording=recording, is_flat=flat),
        }


class StreamRenderer(Generic[Chosen]):
    """Writes the chunks of one response.

    stats: of the run whose events these are
    places: what writes their ids; None where the client wants none
    """

    def __init__(
        self,
        request: CompletionRequest,
        stats: RunStats,
        *,
        composer: EventComposer[Chosen],
        writer: ChunkWriter[Chosen],
        places: Places | None = None,
    ) -> None:
        self._request = request
        self._composer: EventComposer[Chosen] = composer
        self._writer: ChunkWriter[Chosen] = writer
        self._stats = stats
        self._places = places
        self._num_finished = 0
        self._last: Chosen | None = None  # kept for the usage of the whole response, which it carries
        self._first_recording: Recording | None = None
        self._is_timed = request.has_timings and request.timings_per_token
        has_null = request.dialect.chunks_have_null_usage and request.stream_options.include_usage
        self._null_usage: dict[str, object] = {"usage": None} if has_null else {}
        self._around: dict[int, tuple[bytes, bytes]] = {}  # the text of a chunk that adds nothing else, by choice

    def chunks(self, event: Event) -> bytes:
        """Return the chunks that this event allows, if any. What was recorded gets a chunk of its own."""
        return b"".join(self.pieces(event))

    def pieces(self, event: Event) -> Sequence[bytes]:
        """Return these chunks one by one."""
        if not self._is_timed and self._composer.is_text_alone(event):
            return self._text_chunk(event)
        return [chunk for each, parts in self._composer.by_event(event) for chunk in self._identified(each, parts)]

    def _identified(self, event: Event, parts: Sequence[Part[Chosen]]) -> list[bytes]:
        """Return the chunks of an event, each with its id."""
        shown = [(part, chunk) for part in parts if not part.choice.is_silent for chunk in self._chunks_of(part)]
        places = self._places
        if places is None:
            return [chunk for _, chunk in shown]
        places.begin(event.index)
        num_begun = sum(part.begins for part, _ in shown)
        begun = [places.line(event.index) + chunk for _, chunk in shown[:num_begun]]
        places.advance(event)
        rest = shown[num_begun:]
        left = range(len(rest) - 1, -1, -1)
        return begun + [places.line(event.index, num_left=n) + chunk for n, (_, chunk) in zip(left, rest, strict=True)]

    def _text_chunk(self, event: Event) -> Sequence[bytes]:
        """Return what `pieces` returns for an event that adds text alone; only that text is rendered anew."""
        if self._places is not None:
            self._places.advance(event)
        if not event.delta.text:
            return ()
        around = self._around.get(event.index)
        if around is None:
            (part,) = self._composer.add(event)
            around = self._around[event.index] = self._writer.around(part.choice.with_text(TEXT_MARK), self._null_usage)
        before, behind = around
        chunk = before + dump_text(event.delta.text) + behind
        return (chunk if self._places is None else self._places.line() + chunk,)

    def tail(self) -> bytes:
        """Return what follows the last choice."""
        return b"".join(self.tail_pieces())

    def tail_pieces(self) -> Sequence[bytes]:
        """Return these chunks one by one."""
        chunks: list[bytes] = []
        usage = self._stats.usage
        if self._last is not None:
            extras = {"usage": usage_body(usage), **self._extras(self._last)}
            chunks.append(self._writer.choice(self._last, extras))
        if extension := _sglext(self._request, usage, self._first_recording):
            chunks.append(self._writer.bare(extension | self._null_usage))
        if self._request.stream_options.include_usage:
            chunks.append(self._writer.bare({"usage": usage_body(usage)}))
        chunks.append(DONE)
        if self._places is None:
            return chunks
        return [self._places.line(num_behind=at + 1) + chunk for at, chunk in enumerate(chunks)]

    def _chunks_of(self, part: Part[Chosen]) -> list[bytes]:
        choice, recording = part.choice.without_recording(), part.choice.recording
        of_choice: list[bytes] = self._chunk_of(choice, part)
        if recording is None:
            return of_choice
        if choice.index == 0:
            self._first_recording = recording.recording
        return [*of_choice, self._writer.choice(part.choice.recording_alone(), self._null_usage)]

    def _chunk_of(self, choice: Chosen, part: Part[Chosen]) -> list[bytes]:
        self._num_finished += choice.finish_reason is not None
        if self._request.finish_chunk_has_usage and self._num_finished == self._request.num_choices:
            self._last = choice
            return []
        extras = dict(self._null_usage)
        if self._request.has_continuous_usage:
            extras["usage"] = token_counts(self._composer.prompt_tokens(part.part), part.completion_tokens)
        return [self._writer.choice(choice, extras | self._extras(choice))]

    def _extras(self, choice: Chosen) -> dict[str, object]:
        """Return the timings: with every chunk if the client wants that, otherwise with the last of a choice."""
        is_timed = self._request.timings_per_token or choice.finish_reason is not None
        return {"timings": self._stats.timings.body()} if self._request.has_timings and is_timed else {}


class Rest:
    """Writes what a client lacks of a stream that is told from its beginning.

    A choice ends behind all that the client has seen end: the last one of all may end otherwise than others.
    """

    def __init__(self, renderer: StreamRenderer[Any], seen: Seen) -> None:
        self._renderer = renderer
        self._unseen = dict(seen.choices)
        self._num_behind = seen.num_behind
        self._early: list[Event] = []

    def chunks(self, event: Event) -> bytes:
        """Return what this event allows to be sent, if anything."""
        choice = self._unseen.get(event.index)
        has_ended = choice is not None and choice.has_ended
        if event.delta.finish is not None and not has_ended and self._awaits_ends:
            self._early.append(event)
            return b""
        told = self._told(event, choice)
        if has_ended and event.delta.finish is not None:
            del self._unseen[event.index]
            if not self._awaits_ends:
                early, self._early = self._early, []
                told += b"".join([self._told(each, self._unseen.get(each.index)) for each in early])
        return told

    @property
    def _awaits_ends(self) -> bool:
        return any(each.has_ended for each in self._unseen.values())

    def _told(self, event: Event, choice: SeenChoice | None) -> bytes:
        if choice is None:
            return b"".join(self._renderer.pieces(event))
        delta = event.delta
        if choice.has_ended:
            pieces = self._renderer.pieces(event)
            return b"".join(pieces[len(pieces) - choice.num_left :]) if delta.finish is not None else b""
        at = choice.place
        self._renderer.pieces(replace(event, delta=before(delta, at)))
        rest = replace(behind(delta, at), prompt=None)
        tokens, chars, logprobs = at
        choice.place = left = (
            max(0, tokens - len(delta.token_ids)),
            max(0, chars - len(delta.text)),
            max(0, logprobs - len(delta.logprobs)),
        )
        if left != (0, 0, 0) and delta.finish is None:
            return b""
        del self._unseen[event.index]
        has_more = rest.text or rest.token_ids or not rest.is_bare
        return b"".join(self._renderer.pieces(replace(event, delta=rest))) if has_more else b""

    def tail(self) -> bytes:
        """Return what ends the stream."""
        return b"".join(self._renderer.tail_pieces()[self._num_behind :])


def completion_renderer(
    request: CompletionRequest, head: ResponseHead, stats: RunStats, places: Places | None = None
) -> StreamRenderer[Choice]:
    """Return what writes the chunks of POST /v1/completions."""
    writer = ChunkWriter(head, written_choice)
    return StreamRenderer(request, stats, composer=Composer(request), writer=writer, places=places)


async def collect(run: Run, request: CompletionRequest, *, head: ResponseHead) -> dict[str, object] | Fragment:
    """Read a run to its end and build the whole body."""
    scores = [Score() for _ in range(request.num_choices)]
    events = _scored(run, scores) if request.is_ranked else run
    choices = await whole_choices(events, Composer(request))
    if request.is_ranked:
        choices = best_choices(request, choices, scores)
    return await whole_body(run, request, choices, head=head)


async def whole_choices(events: AsyncIterator[Event], composer: EventComposer[Chosen]) -> list[Chosen]:
    """Read a run to its end and return its choices in order."""
    choices = [part.choice async for part in whole_parts(events, composer)]
    return sorted(choices, key=lambda choice: choice.index)


async def whole_parts(events: AsyncIterator[Event], composer: EventComposer[Chosen]) -> AsyncIterator[Part[Chosen]]:
    """Yield the last part of each choice as soon as it comes, with what all of them added."""
    parts: dict[int, list[Chosen]] = {}
    async for event in events:
        for part in composer.add(event):
            of_choice = parts.setdefault(part.choice.index, [])
            of_choice.append(part.choice)
            if part.choice.finish_reason is not None:
                yield replace(part, choice=part.choice.joined(of_choice))


async def whole_body(
    run: Run, request: CompletionRequest, choices: Sequence[Chosen], *, head: ResponseHead, kind: str = OBJECT
) -> dict[str, object] | Fragment:
    """Return the body. If it has many numbers, a thread writes it, so that the event loop goes on."""
    recording = choices[0].recording
    extras = _sglext(request, run.stats.usage, None if recording is None else recording.recording)
    if request.has_timings:
        extras["timings"] = run.stats.timings.body()
    make = partial(completion_body, head, choices, usage=run.stats.usage, extras=extras, kind=kind)
    return make() if recording is None else await asyncio.to_thread(lambda: Fragment(dump(make())))


async def _scored(events: AsyncIterator[Event], scores: Sequence[Score]) -> AsyncIterator[Event]:
    async for event in events:
        scores[event.index].add(event)
        yield event


def _sglext(request: CompletionRequest, usage: Usage, recording: Recording | None) -> dict[str, object]:
    return sglext_members(usage if request.return_cached_tokens_details else None, recording)


class Composer(EventComposer[Choice]):
    """Puts echoed prompts in front, moves offsets behind them, and ends each choice with the suffix that it shows."""

    def __init__(self, request: CompletionRequest) -> None:
        self._echo = request.echo or request.echo_last > 0
        self._wants_logprobs = request.logprobs is not None
        needs_report = self._echo or request.return_token_ids or request.has_continuous_usage
        super().__init__(request, needs_report=needs_report or request.prompt_logprobs is not None)
        shows_suffix = request.suffix_mode is SuffixMode.APPEND or request.echo
        self._suffix = (request.suffix or "") if shows_suffix else ""
        self._has_begun: set[int] = set()
        self._calls = CallReader(request.tool_use)
        wants_more = self._needs_report or self._wants_logprobs or bool(request.tool_use.names)
        self._shows_text_alone = not wants_more

    def is_text_alone(self, event: Event) -> bool:
        return self._shows_text_alone and event.delta.is_bare

    def is_prompt_cut(self, part: int) -> bool:
        """Return whether the prompt lost its beginning because the context is too short."""
        return self._reports[part].num_dropped_tokens > 0

    def _parts(self, event: Event) -> list[Part[Choice]]:
        """Return the parts of an event. A suffix comes before the end of its choice, so that the end shows no text."""
        part = self._part(event)
        choice = part.choice
        if not self._suffix or choice.finish_reason is None:
            return [part]
        text = replace(choice, text=choice.text + self._suffix, finish_reason=None, matched_stop=None, tool_calls=())
        end = Choice(
            index=choice.index,
            model=choice.model,
            finish_reason=choice.finish_reason,
            matched_stop=choice.matched_stop,
            token_ids=None if choice.token_ids is None else (),
            logprobs=None if choice.logprobs is None else LegacyLogprobs(),
            tool_calls=choice.tool_calls,
        )
        return [replace(part, choice=text, is_context_end=False), replace(part, choice=end)]

    def _part(self, event: Event) -> Part[Choice]:
        delta, index, wants_ids = event.delta, event.index, self._request.return_token_ids
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
            **self._common(event),
            text=text,
            logprobs=logprobs if self._wants_logprobs else None,
            finish_reason=None if delta.finish is None else delta.finish.reason,
            prompt_token_ids=self._reports[event.part].token_ids if wants_ids and is_first else None,
            prompt_logprobs=self._scores(event.part) if is_first else None,
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
        """Return vLLM's log-probabilities of the prompt; None if they were not asked for."""
        num_top = self._request.prompt_logprobs
        return None if num_top is None else ranked_body(self._reports[part].whole_logprobs or (), num_top)


@dataclass(slots=True)
class Score:
    """How likely a completion is, by the tokens whose text is shown and the one that ended it."""

    total: float = 0.0
    num_tokens: int = 0

    @property
    def mean(self) -> float:
        """Return the log-probability per token; a completion without tokens ranks behind all others."""
        return self.total / self.num_tokens if self.num_tokens else float("-inf")

    def add(self, event: Event) -> None:
        for entry in event.delta.logprobs:
            assert entry.logprob is not None, "a generated token has a log-probability"
            self.total += entry.logprob
            self.num_tokens += 1


def best_choices(request: CompletionRequest, choices: Sequence[Choice], scores: Sequence[Score]) -> list[Choice]:
    """Of each prompt as many as are returned, the best first.

    choices, scores: of every completion, by index

    OpenAI's `best_of` compares by mean and numbers anew; mistral.rs compares by sum and keeps the indices.
    """
    best: list[Choice] = []
    for part in range(request.num_parts):
        first = part * request.num_candidates
        places = sorted(
            range(first, first + request.num_candidates), key=lambda place: _key(request, scores[place]), reverse=True
        )
        best += [choices[place] for place in places[: request.num_returned]]
    if request.dialect.best_of is BestOf.CANDIDATES:
        return [replace(choice, index=index) for index, choice in enumerate(best)]
    return best


def _key(request: CompletionRequest, score: Score) -> float:
    return score.total if request.dialect.best_of is BestOf.RETURNED and score.num_tokens else score.mean


async def collect_recordings(run: Run, body: Callable[[Sequence[Recording], Usage], object]) -> Fragment:
    """Read a run to its end and write the whole body, made of what was recorded of each prompt, in their order."""
    found: dict[int, Recording] = {}
    async for event in run:
        if event.delta.recording is not None:
            found[event.index] = event.delta.recording
    recordings = [found[index] for index in range(len(run.requests))]
    usage = run.stats.usage
    return await asyncio.to_thread(lambda: Fragment(dump(body(recordings, usage))))
