"""The calls of a router to the replicas of a model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Protocol

from serve_app.core.adapters import AdapterSet
from serve_app.core.cards import AdapterCard, ModelCard, ReplicaCard
from serve_app.core.delta import Frame
from serve_app.core.progress import Past
from serve_app.core.prompt import Tokenization, TokenizeRequest
from serve_app.core.request import GenerationRequest

NOTHING: Mapping[str, int] = {}

LONG_TEXT = 32_768
"""Characters and ids of all prompts of a call together. Longer texts may wait for other callers' long texts."""


class Backend(Protocol):
    """One replica of a base model, as a router sees it. Deployments carry these calls over Ray.

    The deltas of all submitted requests come back through the one stream that `attach` opened for the router.
    """

    async def hello(self, router_id: str, heard: Mapping[str, int] = NOTHING) -> ReplicaCard:
        """Renew the router's lease, and return the replica's card. The replica aborts the requests of a router whose
        lease has expired.

        heard: by replica, until when the router has heard its news
        """

    def attach(self, router_id: str) -> AsyncGenerator[Frame, None]:
        """Stream frames to the router until it leaves. A second attach of the same router ends the first."""

    async def submit(self, router_id: str, requests: Sequence[GenerationRequest]) -> bool:
        """Accept all requests or none, and return whether it keeps all that it was to keep (`kept`).

        Raises ServeError if it refuses any; then it has started none.
        """
        ...

    async def abort(self, router_id: str, request_ids: Sequence[str]) -> None:
        """Abort requests; no delta follows for them. Ignore unknown and finished ones."""

    async def pause(self, router_id: str, request_ids: Sequence[str]) -> None:
        """Take requests out of the batch until they are resumed, as their reader is slow.

        They keep what they have generated. Deltas of a running step still follow. Ignore unknown and finished ones.
        """

    async def resume(self, router_id: str, request_ids: Sequence[str]) -> None:
        """Let paused requests go on."""

    async def recall(self, response_id: str, owner: str, claim: str) -> tuple[Past, ...]:
        """Return what is kept of an owner's stream, under either of its ids, so that another router goes on with it.

        What still runs of it ends, and the router that had it is told so.

        claim: names this fetch; for others the stream `is_taken` for a moment. With "" it is only looked at: what runs
            goes on where it is
        """
        ...

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        """Tokenize a text or a rendered conversation. Raises Overloaded, InvalidRequest."""

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens by name. Raises Overloaded."""

    async def stage_adapter(self, name: str, path: str, version: str) -> AdapterCard:
        """Read and try an adapter beside what is served. Names mean what they meant; the same version is staged once.

        path: its folder, absolute;  version: digest that its files must have
        Raises InvalidRequest with the reason for which it cannot be served, and Overloaded where there is no room.
        """

    async def apply_adapters(self, published: AdapterSet) -> ModelCard:
        """Let names mean what this set says, and return the card as it is then. Running requests keep their versions.

        An older revision than the applied one changes nothing. An adapter that cannot be served is on the card with
        the reason.
        """


def has_images(request: GenerationRequest) -> bool:
    """Return whether the request's images must be decoded before it is accepted."""
    conversation = request.conversation
    return bool(request.prompt.images) or (conversation is not None and bool(conversation.images))


def text_size(requests: Iterable[GenerationRequest]) -> int:
    """Return the characters and ids that are to be tokenized; a conversation counts by the text it is rendered from."""
    return sum(
        each.num_chars
        + each.prompt.num_ids
        + len(each.prediction)
        + (0 if each.conversation is None else len(each.conversation.source))
        for each in requests
    )


def may_take_long(requests: Sequence[GenerationRequest]) -> bool:
    """Return whether accepting the requests may take long: they have images, or much text to tokenize or render."""
    return any(map(has_images, requests)) or text_size(requests) > LONG_TEXT // 2
