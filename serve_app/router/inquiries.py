"""What is asked of models beside completions: tokens of a text, text of tokens, properties, explanations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

from serve_app.api.completion import CompletionRequest
from serve_app.api.listings import ExplainedAdapter, ExplainedPart, Room
from serve_app.core.cards import ModelCard
from serve_app.core.errors import InvalidRequest, ModelLoading, ReplicaLost
from serve_app.core.names import ModelRef
from serve_app.core.prompt import Tokenization, TokenizeRequest
from serve_app.core.request import GenerationRequest, leaves_no_room
from serve_app.core.tenants import NANO
from serve_app.router.fleet import MAX_NAMED, View
from serve_app.router.link import ReplicaLink
from serve_app.router.router import Router

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
        names = sorted({*self._view.bases, *self._view.loading, *self._view.asleep, *self._view.failed})
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
        return await self._ask(model, lambda link: link.ask(link.backend.tokenize(request)))

    async def detokenize(self, model: str | None, token_ids: Sequence[int]) -> str:
        """Raises InvalidRequest for an id that the model does not have."""
        vocab_size = self.card(model).vocab_size
        for at, token_id in enumerate(token_ids):
            if token_id >= vocab_size:
                must = f"be a token id from 0 to {vocab_size - 1}"
                raise InvalidRequest.refusing(f"tokens[{at}]", must=must, found=str(token_id))
        return await self._ask(model, lambda link: link.ask(link.backend.detokenize(token_ids)))

    def _base(self, model: str | None) -> ModelRef:
        """An adapter has its base's tokenizer."""
        return ModelRef(base=self._view.resolve(self.model_named(model)).base)

    async def _ask(self, model: str | None, ask: Callable[[ReplicaLink], Awaitable[Result]]) -> Result:
        """The least busy replica, and the others in turn where one turns out to be lost."""
        links = sorted(self._view.links_for(self._base(model)), key=lambda link: link.work)
        for link in links[:-1]:
            try:
                return await ask(link)
            except ReplicaLost:
                continue
        return await ask(links[-1])


class Explainer:
    """Answers as the tenant whose router it has would be answered."""

    def __init__(self, router: Router, inquiries: Inquiries) -> None:
        self._router = router
        self._inquiries = inquiries

    async def explain(self, request: CompletionRequest) -> list[ExplainedPart]:
        """Each prompt for each model, in the order of their choices. Raises whatever the request itself would.

        It is one of the requests that are open, as its cutting into tokens is work of a replica.
        """
        ticket = self._router.enter()
        try:
            return await self._parts(request)
        finally:
            ticket.give_back()

    async def _parts(self, request: CompletionRequest) -> list[ExplainedPart]:
        settled = self._router.settled(request)
        known: dict[tuple[str, int], int | None] = {}
        parts = []
        for each in self._router.lowered(settled, "explain"):
            place = (each.model.base, each.prompt_index)
            if place not in known:
                known[place] = await self._count(each)
            card = self._inquiries.card(each.model.name)
            defaults = settled.defaults_of(card.default_sampling)
            parts.append(self._explained(each, card, known[place], defaults))
        return parts

    def _explained(
        self, request: GenerationRequest, card: ModelCard, num_tokens: int | None, defaults: Mapping[str, float]
    ) -> ExplainedPart:
        room = room_of(request, num_tokens, max_model_len=card.max_model_len)
        longest = room.max_completion_tokens if room.max_completion_tokens is not None else card.max_model_len
        prompt = room.kept_prompt_tokens if room.kept_prompt_tokens is not None else card.max_model_len
        model, price = request.model, self._router.prices.of(request.model.base, request.model.adapter)
        cost = price.cost(prompt_tokens=prompt, cached_tokens=0, completion_tokens=request.n * longest)
        parts = (ExplainedAdapter(name=each.adapter, version=each.version, scale=each.scale) for each in model.parts)
        return ExplainedPart(
            **asdict(room),
            model=model.name,
            base=model.base,
            adapters=tuple(parts),
            prompt=request.prompt_index,
            completions=request.n,
            max_model_len=card.max_model_len,
            default_sampling=defaults,
            cost_at_most=0 if room.refused_because else cost / NANO,
            price=price,
        )

    async def _count(self, request: GenerationRequest) -> int | None:
        """The tokens of a prompt; None of a gap, and beside images, which are seen by who computes them."""
        if request.infill is not None or request.prompt.images:
            return None
        if request.conversation is not None:
            if request.conversation.images:
                return None
            return await self._tokens(request, TokenizeRequest(conversation=request.conversation, param="messages"))
        found, adds_special = request.prompt.num_ids, request.prompt.adds_special
        for at, part in enumerate(request.prompt.parts):
            if isinstance(part, str):
                found += await self._tokens(request, TokenizeRequest(text=part, adds_special=adds_special and at == 0))
        return found

    async def _tokens(self, request: GenerationRequest, asked: TokenizeRequest) -> int:
        return len((await self._inquiries.tokenize(request.model.name, asked)).token_ids)


def room_of(request: GenerationRequest, num_tokens: int | None, *, max_model_len: int) -> Room:
    """What the context leaves a prompt of so many tokens, and its completion."""
    if num_tokens is None:
        return Room(prompt_tokens=None)
    context, wanted = request.context, request.stop.max_tokens
    kept = context.num_wanted(num_tokens, max_tokens=wanted, max_model_len=max_model_len)
    kept = context.num_kept(kept, max_tokens=wanted, max_model_len=max_model_len)
    if leaves_no_room(kept, wanted, max_model_len=max_model_len):
        reason = f"The prompt has {kept} tokens, and the model's context is {max_model_len}."
        return Room(prompt_tokens=num_tokens, kept_prompt_tokens=kept, refused_because=reason)
    room = max_model_len - kept
    if wanted is not None and wanted > room and not context.shortens_completion:
        reason = f'"{context.max_tokens_name}" must be at most {room} beside a prompt of {kept} tokens; found {wanted}.'
        return Room(prompt_tokens=num_tokens, kept_prompt_tokens=kept, refused_because=reason)
    return Room(
        prompt_tokens=num_tokens,
        kept_prompt_tokens=kept,
        max_completion_tokens=room if wanted is None else min(wanted, room),
    )
