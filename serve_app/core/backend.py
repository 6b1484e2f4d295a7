"""The seam between a router and the replicas of a model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from serve_app.core.cards import ReplicaCard
from serve_app.core.delta import Frame
from serve_app.core.prompt import Tokenization, TokenizeRequest
from serve_app.core.request import GenerationRequest

NOTHING: Mapping[str, int] = MappingProxyType({})

LONG_TEXT = 32_768
"""Characters and ids of all prompts of a call together; longer texts may wait long for those of others."""


class Backend(Protocol):
    """One replica of a base model, as a router speaks to it; deployments carry these calls over Ray.

    Deltas of every submitted request come back through the one stream that `attach` opened for that router.
    """

    async def hello(self, router_id: str, heard: Mapping[str, int] = NOTHING) -> ReplicaCard:
        """Say who you are. Also keeps alive what the router has submitted: a router that is not heard of for
        the lease's time is taken for dead and its requests are aborted.

        heard: by replica, until when the router has heard its news
        """
        ...

    def attach(self, router_id: str) -> AsyncGenerator[Frame, None]:
        """Stream frames to the router until it leaves. A second attach of the same router ends the first."""
        ...

    async def submit(self, router_id: str, requests: Sequence[GenerationRequest]) -> None:
        """Accept all requests or none.

        Raises ServeError where any is refused; nothing was started then.
        """
        ...

    async def abort(self, router_id: str, request_ids: Sequence[str]) -> None:
        """End these requests; those unknown or finished are left alone. No delta follows for them."""
        ...

    async def pause(self, router_id: str, request_ids: Sequence[str]) -> None:
        """Take these requests out of the batch until they are resumed: their reader is slow, and others want their
        place. They keep what they have generated; deltas of a step that runs still follow. Those unknown or finished
        are left alone."""
        ...

    async def resume(self, router_id: str, request_ids: Sequence[str]) -> None:
        """Let paused requests go on."""
        ...

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        """Cut a text, or what the template makes of a conversation, into tokens, for its own sake.

        Raises Overloaded, InvalidRequest.
        """
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Give the text of tokens, special ones by their names. Raises Overloaded."""
        ...


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
