"""Turns the events of a chat's run into the items of a response, whole or in events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve_app.api.responding import Item, ResponsesRequest
from serve_app.api.response_items import ResponseWriter
from serve_app.api.responses import ResponseHead
from serve_app.api.sse import dump
from serve_app.api.sse import event as sse_event
from serve_app.core.errors import ServeError
from serve_app.router.chat import ChatComposer
from serve_app.router.event import Event
from serve_app.router.message import Writing
from serve_app.router.run import Run


class ResponseRenderer:
    """Writes the events of POST /v1/responses, in OpenAI's sequence; the last of them is the whole response."""

    def __init__(
        self,
        request: ResponsesRequest,
        head: ResponseHead,
        run: Run,
        *,
        writings: Sequence[Writing],
    ) -> None:
        self._composer = ChatComposer(request, writings)
        self._writer = ResponseWriter(request, head)
        self._run = run
        self._has_begun = False

    def items(self, event: Event) -> list[Item]:
        """What this event of the run tells."""
        begun = [] if self._has_begun else [*self._writer.begin()]
        self._has_begun = True
        parts = self._composer.add(event)
        return begun + [each for part in parts for each in self._writer.add(part.choice, part.completion_tokens)]

    def last_items(self) -> list[Item]:
        """What tells the end of the run."""
        return [*self._writer.end(self._run.tally.usage)]

    def chunks(self, event: Event) -> bytes:
        return _written(self.items(event))

    def tail(self) -> bytes:
        return _written(self.last_items())

    def failed(self, error: ServeError) -> bytes:
        """The end of a stream that had begun."""
        return _written([*([] if self._has_begun else self._writer.begin()), self._writer.failed(error)])


async def collect_response(run: Run, renderer: ResponseRenderer) -> Item:
    """Read a run to its end: the response that its last event tells."""
    async for event in run:
        renderer.items(event)
    response: Item = renderer.last_items()[-1]["response"]
    return response


def _written(items: Iterable[Item]) -> bytes:
    return b"".join(sse_event(dump(item), kind=item["type"]) for item in items)
