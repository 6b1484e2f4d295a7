"""What is asked of models beside completions: tokens of a text, text of tokens, properties, adapters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from serve_app.core.cards import ModelCard
from serve_app.core.errors import InvalidRequest, ModelLoading, ReplicaLost
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Tokenization, TokenizeRequest
from serve_app.router.link import ReplicaLink
from serve_app.router.view import View

MAX_NAMED = 10
Result = TypeVar("Result")


class Inquiries:
    """Answers from the cards of a fleet as somebody sees it, and by its least busy replicas."""

    def __init__(self, view: View) -> None:
        self._view = view

    def model_named(self, model: str | None) -> str:
        """The model meant: the one that was sent, or the only one there is.

        Raises InvalidRequest where none was sent and several are served or none may be used, ModelLoading where none
        is ready.
        """
        if model is not None:
            return model
        names = sorted({*self._view.bases, *self._view.loading, *self._view.failed})
        if not names and self._view.cards:
            raise InvalidRequest.refusing("model", must="name an adapter, as no base may be used", found="nothing")
        if not names and not self._view.rights.patterns:
            raise InvalidRequest.refusing("model", must="be one that may be used, and none may", found="nothing")
        if not names:
            raise ModelLoading("No model is ready yet.", "model", {"retry_after_s": 5})
        if len(names) > 1:
            listed = ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")
            must = f"be one of {listed} where several models are served"
            raise InvalidRequest.refusing("model", must=must, found="nothing")
        return names[0]

    def card(self, model: str | None) -> ModelCard:
        """The base of a model. Raises ServeError where there is none."""
        return self._view.cards[self._base(model).base]

    async def tokenize(self, model: str | None, request: TokenizeRequest) -> Tokenization:
        return await self._ask(model, lambda link: link.tokenize(request))

    async def detokenize(self, model: str | None, token_ids: Sequence[int]) -> str:
        """Raises InvalidRequest for an id that the model does not have."""
        vocab_size = self.card(model).vocab_size
        for at, token_id in enumerate(token_ids):
            if token_id >= vocab_size:
                must = f"be a token id from 0 to {vocab_size - 1}"
                raise InvalidRequest.refusing(f"tokens[{at}]", must=must, found=str(token_id))
        return await self._ask(model, lambda link: link.detokenize(token_ids))

    def _base(self, model: str | None) -> ModelRef:
        """An adapter has its base's tokenizer."""
        return ModelRef(base=self._view.resolve(self.model_named(model)).base)

    async def _ask(self, model: str | None, ask: Callable[[ReplicaLink], Awaitable[Result]]) -> Result:
        """The least busy replica, and the others in turn where one turns out to be lost."""
        links = sorted(self._view.links_for(self._base(model)), key=lambda link: link.standing.work)
        for link in links[:-1]:
            try:
                return await ask(link)
            except ReplicaLost:
                continue
        return await ask(links[-1])
