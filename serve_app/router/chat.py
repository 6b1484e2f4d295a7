"""Turns the events of a chat's run into its messages, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve_app.api.chat import ChatRequest
from serve_app.api.forms.messages import text_of
from serve_app.api.responding import Item, ResponsesRequest
from serve_app.api.response_items import ResponseWriter
from serve_app.api.responses import (
    ASSISTANT,
    CHAT_CHUNK_OBJECT,
    CHAT_OBJECT,
    ChatChoice,
    ChunkWriter,
    ResponseHead,
    written_message,
)
from serve_app.api.sse import Fragment, dump
from serve_app.api.sse import event as sse_event
from serve_app.core.delta import PromptReport
from serve_app.core.errors import ServeError
from serve_app.router.inbox import Event
from serve_app.router.message import MessageReader, Writing, message_reader
from serve_app.router.places import Places
from serve_app.router.render import EventComposer, Part, StreamRenderer, whole_body, whole_choices
from serve_app.router.run import Run


class ChatComposer(EventComposer[ChatChoice]):
    """Makes messages of texts: the role first, thoughts and calls of tools apart.

    writings: of the model of each part. Where one has thoughts, the report of its prompt is awaited, which says whether
              it ends in one
    """

    def __init__(self, request: ChatRequest, writings: Sequence[Writing]) -> None:
        super().__init__(request, needs_report=request.return_token_ids or request.has_continuous_usage)
        self._request: ChatRequest = request
        self._writings = writings
        self._shows_text_alone = not self._needs_report and request.logprobs is None
        self._readers: dict[int, MessageReader] = {}

    def is_text_alone(self, event: Event) -> bool:
        reader = self._readers.get(event.index)
        return self._shows_text_alone and event.delta.is_bare and reader is not None and reader.is_text_alone

    def _awaits_report(self, part: int) -> bool:
        splits = self._request.splits_reasoning and self._writings[part].thoughts.reads_prompt
        return self._needs_report or splits

    def _parts(self, event: Event) -> list[Part[ChatChoice]]:
        num_tokens, parts = event.completion_tokens, []
        if event.index not in self._readers:
            begun = self._begun(event)
            parts.append(Part(choice=begun, part=event.part, completion_tokens=num_tokens, begins=True))
        return [*parts, Part(choice=self._choice(event), part=event.part, completion_tokens=num_tokens)]

    def _begun(self, event: Event) -> ChatChoice:
        """Return the beginning of a message, before there is anything in it."""
        report = self._reports.get(event.part)
        before = self._before(report)
        self._readers[event.index] = message_reader(self._request, self._writings[event.part], before=before)
        prompt_ids = report.token_ids if report is not None and self._request.return_token_ids else None
        return ChatChoice(
            index=event.index,
            role=ASSISTANT,
            prompt_token_ids=prompt_ids,
            model=self._request.listed_model_of(event.part),
        )

    def _before(self, report: PromptReport | None) -> str:
        """Return what stands before the message: the end of the prompt, or the message that the model continues."""
        if self._request.continue_final_message:
            return text_of(self._request.messages[-1])
        return "" if report is None else report.tail

    def _choice(self, event: Event) -> ChatChoice:
        delta = event.delta
        gain = self._readers[event.index].read(delta.text, delta.finish)
        return ChatChoice(
            **self._common(event),
            content=gain.content,
            reasoning=gain.reasoning,
            tool_calls=gain.calls,
            logprobs=None if self._request.logprobs is None else delta.logprobs,
            finish_reason=gain.finish_reason,
        )


def chat_renderer(
    run: Run, request: ChatRequest, head: ResponseHead, writings: Sequence[Writing], places: Places | None
) -> StreamRenderer[ChatChoice]:
    """Return what writes the chunks of POST /v1/chat/completions."""
    writer = ChunkWriter(head, written_message, kind=CHAT_CHUNK_OBJECT)
    composer = ChatComposer(request, writings)
    return StreamRenderer(request, run.stats, composer=composer, writer=writer, places=places)


async def collect_chat(
    run: Run, request: ChatRequest, head: ResponseHead, writings: Sequence[Writing]
) -> dict[str, object] | Fragment:
    """Read a run to its end and build the whole body."""
    choices = await whole_choices(run, ChatComposer(request, writings))
    return await whole_body(run, request, choices, head=head, kind=CHAT_OBJECT)


class ResponseRenderer:
    """Writes the events of POST /v1/responses, in OpenAI's sequence; the last of them is the whole response."""

    def __init__(self, run: Run, request: ResponsesRequest, head: ResponseHead, writings: Sequence[Writing]) -> None:
        self._composer = ChatComposer(request, writings)
        self._writer = ResponseWriter(request, head)
        self.run = run

    def items(self, event: Event) -> list[Item]:
        """Return the events that tell of one event of the run."""
        items = [*self._writer.begin()]
        for part in self._composer.add(event):
            items += self._writer.add(part.choice, part.completion_tokens)
        return items

    def last_items(self) -> list[Item]:
        """Return the events that tell the end of the run."""
        return [*self._writer.end(self.run.stats.usage)]

    def chunks(self, event: Event) -> bytes:
        return _written(self.items(event))

    def tail(self) -> bytes:
        return _written(self.last_items())

    def failed(self, error: ServeError) -> bytes:
        """Return the end of a stream that fails."""
        return _written([*self._writer.begin(), self._writer.failed(error)])


async def collect_response(renderer: ResponseRenderer) -> Item:
    """Read a run to its end and return the response that its last event tells."""
    async for event in renderer.run:
        renderer.items(event)
    response: Item = renderer.last_items()[-1]["response"]
    return response


def _written(items: Iterable[Item]) -> bytes:
    return b"".join(sse_event(dump(item), kind=item["type"]) for item in items)
