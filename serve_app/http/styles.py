"""The ways in which completions are asked for and answered: OpenAI's, with chats and responses, and llama.cpp's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import LLAMA_CPP, Dialect
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.api.error_text import shown
from serve_app.api.limits import WireLimits
from serve_app.api.native import NOT_NATIVE, read_infill
from serve_app.api.parse import CHAT, COMPLETION, NATIVE, Body, read_json_object, read_request
from serve_app.api.paths import Path
from serve_app.api.responding import read_responses
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

Members = dict[str, object]
Read = Callable[[Router, Members, WireLimits, Dialect], CompletionRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a body is read and an answer is written, by a router as a tenant sees it.

    read:     makes a request of a body's members; raises InvalidRequest
    whole:    makes the body of an answer that is no stream;  renderer: writes a stream; None where there are none
    has_ids:  whether events of streams have ids where the client wants them, by which a stream can be fetched anew
    has_capsules: whether an answer that is no stream is kept where its client wants that
    dialect:  of requests that name none; None is what the router says of their model
    """

    read: Read
    whole: Callable[[Router, Run, Any, ResponseHead], Awaitable[object]]
    renderer: Callable[[Router, Run, Any, ResponseHead, Places | None], Renderer] | None = None
    has_ids: bool = False
    has_capsules: bool = False
    dialect: Dialect | None = None

    def parse(
        self, router: Router, body: bytes, limits: WireLimits, choose_dialect: Callable[[object], Dialect]
    ) -> CompletionRequest:
        """Return the request. Raises InvalidRequest.

        choose_dialect: told the `model` that was sent, whatever that is
        """
        members = read_json_object(body, max_depth=limits.max_depth)
        return self.read(router, members, limits, choose_dialect(members.get("model")))


def _reading(kind: Body[Any]) -> Read:
    return lambda router, members, limits, dialect: read_request(kind, members, limits, dialect=dialect).seeded()


def _read_native(router: Router, members: Members, limits: WireLimits, dialect: Dialect) -> CompletionRequest:
    if members.get("model") is None:
        members["model"] = Inquiries(router.view).model_named(None)
    return checked_native(read_request(NATIVE, members, limits, dialect=dialect)).seeded()


def _read_infill(router: Router, members: Members, limits: WireLimits, dialect: Dialect) -> CompletionRequest:
    only_model = partial(Inquiries(router.view).model_named, None)
    return checked_native(read_infill(members, limits, dialect, model=only_model)).seeded()


def _of_inputs(kind: type[EmbeddingRequest]) -> Style:
    """Return the style of completions of no tokens, `model` optional where there is one."""

    def read(router: Router, members: Members, limits: WireLimits, dialect: Dialect) -> CompletionRequest:
        return kind.read(members, limits, dialect, model=partial(Inquiries(router.view).model_named, None))

    async def whole(router: Router, run: Run, request: EmbeddingRequest, head: ResponseHead) -> object:
        record = run.requests[0].record
        assert record is not None
        assert record.embedding is not None
        return await collect_recordings(run, partial(request.answer, head, record.embedding))

    return Style(read=read, whole=whole)


NATIVE_STYLE = Style(
    read=_read_native,
    whole=lambda router, run, request, head: collect_native(run, request),
    renderer=lambda router, run, request, head, places: NativeRenderer(request, run.stats),
    dialect=LLAMA_CPP,
)
STYLES: Mapping[Path, Style] = MappingProxyType(
    {
        Path.COMPLETIONS: Style(
            read=_reading(COMPLETION),
            whole=lambda router, run, request, head: collect(run, request, head=head),
            renderer=lambda router, run, request, head, places: completion_renderer(request, head, run.stats, places),
            has_ids=True,
            has_capsules=True,
        ),
        Path.CHAT: Style(
            read=_reading(CHAT),
            whole=lambda router, run, request, head: collect_chat(run, request, head, router.writings_of(run)),
            renderer=lambda router, run, request, head, places: chat_renderer(
                run, request, head, router.writings_of(run), places
            ),
            has_ids=True,
            has_capsules=True,
        ),
        Path.RESPONSES: Style(
            read=lambda router, members, limits, dialect: read_responses(members, limits, dialect).seeded(),
            whole=lambda router, run, request, head: collect_response(
                ResponseRenderer(run, request, head, router.writings_of(run))
            ),
            renderer=lambda router, run, request, head, places: ResponseRenderer(
                run, request, head, router.writings_of(run)
            ),
            has_capsules=True,
        ),
        **{path: _of_inputs(kind) for path, kind in INPUT_ROUTES.items()},
        Path.NATIVE_COMPLETION: NATIVE_STYLE,
        Path.NATIVE_COMPLETIONS: NATIVE_STYLE,
        Path.INFILL: replace(NATIVE_STYLE, read=_read_infill),
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
