"""The ways in which completions are asked for and answered: OpenAI's, with chats and responses, and llama.cpp's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import ClassVar

from serve_app.api.chat import ChatRequest
from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import LLAMA_CPP, Dialect
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.api.error_text import shown
from serve_app.api.limits import WireLimits
from serve_app.api.native import NOT_NATIVE, read_infill
from serve_app.api.parse import CHAT, COMPLETION, NATIVE, read_json_object, read_request
from serve_app.api.paths import Path
from serve_app.api.responding import ResponsesRequest, read_responses
from serve_app.api.responses import ResponseHead
from serve_app.api.scoring import INPUT_ROUTES
from serve_app.core.errors import UnsupportedParameter
from serve_app.http.streams import Renderer
from serve_app.router.chat import ResponseRenderer, chat_renderer, collect_chat, collect_response
from serve_app.router.inquiries import Inquiries
from serve_app.router.native import NativeRenderer, collect_native
from serve_app.router.places import Places
from serve_app.router.render import collect, collect_recordings, completion_renderer
from serve_app.router.router import Router
from serve_app.router.run import Run

ChooseDialect = Callable[[object], Dialect]
"""Returns the dialect of a request from the `model` that was sent, whatever that is."""


class Style(ABC):
    """How a body is read and an answer is written.

    has_ids: whether events of streams have ids where the client wants them, by which a stream can be fetched anew
    """

    has_ids: ClassVar[bool] = False

    def __init__(self, router: Router, inquiries: Inquiries) -> None:
        self._router = router
        self._inquiries = inquiries

    def dialect_of(self, model: object) -> Dialect:
        """Return the dialect of requests that name none; `model` is what was sent, whatever it is."""
        return self._router.dialect_of(model)

    def parse(self, body: bytes, limits: WireLimits, choose_dialect: ChooseDialect) -> CompletionRequest:
        """Return the request. Raises InvalidRequest."""
        members = read_json_object(body, max_depth=limits.max_depth)
        return self._read(members, limits, choose_dialect(members.get("model")))

    @abstractmethod
    def _read(self, members: dict[str, object], limits: WireLimits, dialect: Dialect) -> CompletionRequest: ...

    def _only_model(self) -> str:
        return self._inquiries.model_named(None)

    @abstractmethod
    def renderer(
        self, run: Run, request: CompletionRequest, head: ResponseHead, places: Places | None = None
    ) -> Renderer: ...

    @abstractmethod
    async def whole(self, run: Run, request: CompletionRequest, head: ResponseHead) -> object:
        """Return the body of a response that is no stream."""


class OpenAiStyle(Style):
    """POST /v1/completions."""

    has_ids = True

    def _read(self, members: dict[str, object], limits: WireLimits, dialect: Dialect) -> CompletionRequest:
        return read_request(COMPLETION, members, limits, dialect=dialect).seeded()

    def renderer(
        self, run: Run, request: CompletionRequest, head: ResponseHead, places: Places | None = None
    ) -> Renderer:
        return completion_renderer(request, head, run.stats, places)

    async def whole(self, run: Run, request: CompletionRequest, head: ResponseHead) -> object:
        return await collect(run, request, head=head)


class ChatStyle(Style):
    """POST /v1/chat/completions."""

    has_ids = True

    def _read(self, members: dict[str, object], limits: WireLimits, dialect: Dialect) -> CompletionRequest:
        return read_request(CHAT, members, limits, dialect=dialect).seeded()

    def renderer(
        self, run: Run, request: CompletionRequest, head: ResponseHead, places: Places | None = None
    ) -> Renderer:
        assert isinstance(request, ChatRequest)
        return chat_renderer(request, head, run, writings=self._router.writings_of(run), places=places)

    async def whole(self, run: Run, request: CompletionRequest, head: ResponseHead) -> object:
        assert isinstance(request, ChatRequest)
        return await collect_chat(run, request, head=head, writings=self._router.writings_of(run))


class ResponsesStyle(Style):
    """POST /v1/responses: a chat whose answer is items."""

    def _read(self, members: dict[str, object], limits: WireLimits, dialect: Dialect) -> CompletionRequest:
        return read_responses(members, limits, dialect).seeded()

    def renderer(
        self, run: Run, request: CompletionRequest, head: ResponseHead, places: Places | None = None
    ) -> ResponseRenderer:
        assert isinstance(request, ResponsesRequest)
        return ResponseRenderer(request, head, run, writings=self._router.writings_of(run))

    async def whole(self, run: Run, request: CompletionRequest, head: ResponseHead) -> object:
        return await collect_response(run, self.renderer(run, request, head))


class InputStyle(Style):
    """Embeddings and scores of inputs: completions of no tokens, `model` optional where there is one."""

    def __init__(self, router: Router, inquiries: Inquiries, *, kind: type[EmbeddingRequest]) -> None:
        super().__init__(router, inquiries)
        self._kind = kind

    def _read(self, members: dict[str, object], limits: WireLimits, dialect: Dialect) -> CompletionRequest:
        return self._kind.read(members, limits, dialect, model=self._only_model)

    def renderer(
        self, run: Run, request: CompletionRequest, head: ResponseHead, places: Places | None = None
    ) -> Renderer:
        raise AssertionError("vectors and scores are no stream")

    async def whole(self, run: Run, request: CompletionRequest, head: ResponseHead) -> object:
        record = run.requests[0].record
        assert isinstance(request, EmbeddingRequest)
        assert record is not None
        assert record.embedding is not None
        return await collect_recordings(run, partial(request.answer, head, record.embedding))


class NativeStyle(Style):
    """POST /completion and /completions: the same parameters, `model` optional where there is one."""

    def dialect_of(self, model: object) -> Dialect:
        return LLAMA_CPP

    def _read(self, members: dict[str, object], limits: WireLimits, dialect: Dialect) -> CompletionRequest:
        if members.get("model") is None:
            members["model"] = self._only_model()
        return checked_native(read_request(NATIVE, members, limits, dialect=dialect)).seeded()

    def renderer(
        self, run: Run, request: CompletionRequest, head: ResponseHead, places: Places | None = None
    ) -> Renderer:
        return NativeRenderer(request, run.stats)

    async def whole(self, run: Run, request: CompletionRequest, head: ResponseHead) -> object:
        return await collect_native(run, request)


class InfillStyle(NativeStyle):
    """POST /infill: a gap by llama.cpp's names, answered in its shape."""

    def _read(self, members: dict[str, object], limits: WireLimits, dialect: Dialect) -> CompletionRequest:
        return checked_native(read_infill(members, limits, dialect, model=self._only_model)).seeded()


STYLES: Mapping[Path, Callable[[Router, Inquiries], Style]] = MappingProxyType(
    {
        Path.COMPLETIONS: OpenAiStyle,
        Path.CHAT: ChatStyle,
        Path.RESPONSES: ResponsesStyle,
        **{path: partial(InputStyle, kind=kind) for path, kind in INPUT_ROUTES.items()},
        Path.NATIVE_COMPLETION: NativeStyle,
        Path.NATIVE_COMPLETIONS: NativeStyle,
        Path.INFILL: InfillStyle,
    }
)
"""Styles of the routes whose requests pass admission and the ledger."""


def checked_native(request: CompletionRequest) -> CompletionRequest:
    """Return the request. Raises UnsupportedParameter for what llama.cpp's own shape has no place for."""
    for name in NOT_NATIVE:
        found = getattr(request, name)
        if found is not None and found is not False:
            must = "be absent, as it is carried out at /v1/completions only"
            raise UnsupportedParameter.refusing(name, must=must, found=shown(found))
    return request
