"""A replica behind the `Backend` protocol, whatever engine computes its model.

For each call of `submit`: 1. refuse what has no room, no adapter or no chance to fit; 2. render conversations;
3. compile constraints; 4. encode images; 5. tokenize; 6. give the requests to the engine. Its deltas go back through
`Delivery`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import aclosing, suppress
from contextvars import Context
from dataclasses import replace
from typing import Any

from serve_app.constraints.compiler import Compiled, Compiler
from serve_app.constraints.vocabulary import Vocabulary
from serve_app.core.adapters import AdapterSet
from serve_app.core.backend import NOTHING
from serve_app.core.cards import AdapterCard, ModelCard, PromptLength, ReplicaCard
from serve_app.core.delta import Delta, Frame, Load
from serve_app.core.errors import AdapterNotFound, EngineFailed, ReplicaLost, Resumed
from serve_app.core.ledger import UsageReport
from serve_app.core.progress import Past
from serve_app.core.prompt import Tokenization, TokenizeRequest
from serve_app.core.request import GenerationRequest
from serve_app.replica.adapters import AdapterFiles, ServedAdapters
from serve_app.replica.delivery import BEAT_S, Delivery, Leases, Outbox
from serve_app.replica.engine import EncodedImage, Engine
from serve_app.replica.keeping import Keeping
from serve_app.replica.preparation import Preparation, placed
from serve_app.replica.requests import OpenRequests
from serve_app.replica.tokenizer_pools import Tokenizations, TokenizerPools
from serve_app.replica.told import Told
from serve_app.templates.chat_template import ChatTemplate
from serve_app.templates.rendering import Work
from serve_app.text.tokenizer import TextTokenizer

MAX_TOLD_FLOWS = 32
"""So many flows stand on the card by name, all others together."""


class ModelService:
    """One replica of one base model. Lives on one event loop; the engine has threads of its own.

    card:  what the engine says of the model, with what its folder and its operator say
    clock: seconds, monotonic
    pools: the threads in which prompts are cut into tokens
    adapter_files: reads adapters that are published; None takes none
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        card: ModelCard,
        *,
        replica_id: str,
        clock: Callable[[], float] = time.monotonic,
        pools: TokenizerPools | None = None,
        adapter_files: AdapterFiles | None = None,
    ) -> None:
        config = engine.config
        self.engine = engine
        self.tokenizer = tokenizer
        self._marks = None if engine.images is None else engine.images.marks
        self._preparation = Preparation(
            tokenizer,
            model_name=card.name,
            max_model_len=card.max_model_len,
            max_chars=config.max_tokenized_chars,
            marks=self._marks,
        )
        self._replica_id = replica_id
        self._pools = pools or TokenizerPools(config.max_waiting_chars)
        self._compiler = Compiler(
            lambda: vocabulary_of(tokenizer, engine.eos_token_ids), encode=tokenizer.encode_literal
        )
        self._template = template_of(card := described(card, tokenizer, self._preparation.length), tokenizer)
        card = replace(card, tool_prompt="template") if self._template.shows_tools() else card
        card = replace(card, numerics=numerics_of(card))
        max_chars = self._preparation.length.max_chars
        self._tokenizations = Tokenizations(tokenizer, max_chars=max_chars, render=self._template.render)
        self._open = OpenRequests(config.max_num_sequences + config.max_waiting, clock)
        self._keeping = Keeping(config.resume_bytes, clock)
        self._adapters = ServedAdapters(
            card, engine.adapters, files=adapter_files, used=lambda: self._open.versions, clock=clock
        )
        self._delivery = Delivery(
            self._open,
            end=self._end,
            make_outbox=lambda: Outbox(config.max_outbox_deltas),
            max_outbox_bytes=config.max_outbox_bytes,
        )
        self._leases, self._told = Leases(config.lease_s, clock), Told()
        self._watch_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the engine and the watch over routers. Call it on the event loop that serves."""
        loop = asyncio.get_running_loop()

        def deliver(deltas: list[Delta], load: Load) -> None:
            loop.call_soon_threadsafe(self._deliver, deltas, load)

        self.engine.start(deliver)
        self._watch_task = loop.create_task(self._watch(), context=Context())

    async def warm(self) -> None:
        """Prepare what first requests would wait for."""
        self.engine.warm()
        await asyncio.gather(self._compiler.warm(), self._template.warm())
        await asyncio.to_thread(self.engine.give_back_memory)  # what making them took for a moment

    async def close(self) -> None:
        """End the engine and every stream."""
        if self._watch_task is not None:
            self._watch_task.cancel()
        self._open.clear()  # so that nothing more is tokenized
        await asyncio.to_thread(self.engine.close)
        self._delivery.close()
        self._compiler.close()
        if self.engine.images is not None:
            await asyncio.to_thread(self.engine.images.close)
        self._template.close()
        await asyncio.to_thread(self._pools.close)
        self._tokenizations.close()

    def check(self) -> None:
        """Raise EngineFailed if the engine has failed or hangs."""
        self.engine.check()

    @property
    def card(self) -> ReplicaCard:
        told = self.usage.bounded(MAX_TOLD_FLOWS)
        return ReplicaCard(
            replica_id=self._replica_id,
            model=self._card,
            load=self.engine.load,
            usage=told,
            num_routers_behind=self._adapters.num_behind,
            residency=self.engine.residency,
            kept=self._keeping.card,
        )

    @property
    def _card(self) -> ModelCard:
        return self._adapters.card

    @property
    def usage(self) -> UsageReport:
        """Return what was computed for every flow; the card names only the first flows."""
        return self.engine.usage

    @property
    def num_open(self) -> int:
        """Return the number of sequences that have not ended."""
        return self._open.num_sequences

    @property
    def wait_s(self) -> float:
        """Return how long requests wait here for their first token."""
        return self._open.wait_s(self.engine.config.max_num_sequences)

    async def hello(self, router_id: str, heard: Mapping[str, int] = NOTHING) -> ReplicaCard:
        self._leases.hear(router_id)
        self._check_engine()
        self._adapters.tell(router_id)
        news = self.engine.news(heard.get(self._replica_id, 0))
        return replace(self.card, news=news, prefixes=self._told.take(router_id))

    async def attach(self, router_id: str) -> AsyncGenerator[Frame, None]:
        """Stream frames to a router. When the stream closes, its open requests are aborted."""
        self._check_engine()
        self._leases.hear(router_id)
        async with aclosing(self._delivery.frames(router_id)) as frames:
            async for frame in frames:
                yield frame

    async def submit(self, router_id: str, requests: Items[GenerationRequest]) -> bool:
        self._check_engine()
        self._open.check_room(requests)
        for request in requests:
            self._check_adapter(request)
            self._preparation.length.check(request)  # of a conversation, which has no text yet, later
        self._leases.hear(router_id)
        self._delivery.expect(router_id)
        self._open.add(router_id, requests)
        self._told.note(router_id, requests)
        self._keeping.begin(requests)
        try:
            with self._pools.room_for(requests):
                requests = [await self._rendered(request) for request in requests]
                compiled = await self._compiler.compile_all(requests)
                encoder = self.engine.images
                images = {} if encoder is None else await encoder.encode(requests, self._open.__contains__)
                prepared = await self._pools.run(requests, lambda: self._prepare(requests, compiled, images))
        except BaseException:
            self._open.drop(request.request_id for request in requests)
            self._keeping.forget(request.request_id for request in requests)
            raise
        self._begin(prepared)
        return self._keeping.make_room(requests)

    async def abort(self, router_id: str, request_ids: Items[str]) -> None:
        self._end(self._open.among(request_ids, router_id))

    async def pause(self, router_id: str, request_ids: Items[str]) -> None:
        if known := self._open.among(request_ids, router_id):
            self._open.pause(known)
            self.engine.pause(known)

    async def resume(self, router_id: str, request_ids: Items[str]) -> None:
        if known := self._open.among(request_ids, router_id):
            self._open.resume(known)
            self.engine.resume(known)

    async def recall(self, response_id: str, owner: str, claim: str) -> tuple[Past, ...]:
        found = self._keeping.find(response_id, owner, claim)
        names = [each.request.request_id for each in found] if claim else []
        if running := frozenset(each for each in names if each in self._open):
            error = Resumed("The client has fetched this stream anew, and it goes on there.")
            self._delivery.lose(running, error, self.engine.load)
            self._end(running)
        return tuple(replace(each, numerics=self._card.numerics if each.deltas else "") for each in found)

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        return await self._tokenizations.tokenize(request)

    async def detokenize(self, token_ids: Items[int]) -> str:
        return await self._tokenizations.detokenize(token_ids)

    async def stage_adapter(self, name: str, path: str, version: str) -> AdapterCard:
        self._check_engine()
        return await self._adapters.stage(name, path, version)

    async def apply_adapters(self, published: AdapterSet) -> ModelCard:
        self._check_engine()
        card = await self._adapters.apply(published)
        self._delivery.tell(card.adapters_revision)
        return card

    def detach_silent(self) -> None:
        """Detach routers whose lease has expired; call it at least every `Leases.period_s`."""
        self._keeping.expire()
        for router_id in self._leases.expired():
            self._told.forget(router_id)
            self._adapters.told.pop(router_id, None)
            if router_id in self._delivery:
                self._delivery.give_up(router_id, f"was not heard of for {self._leases.lease_s:.0f} s")

    async def _rendered(self, request: GenerationRequest) -> GenerationRequest:
        """Render a request's conversation into its prompt. Raises InvalidRequest, ContextOverflow."""
        if request.conversation is None:
            return request
        rendering = await self._template.render(request.conversation)
        prompt = placed(request.conversation, rendering, self._marks)
        request = replace(request, prompt=prompt, conversation=None)
        self._preparation.length.check(request)
        return request

    def _prepare(
        self,
        requests: Items[GenerationRequest],
        compiled: Mapping[str, Compiled],
        images: Mapping[str, tuple[EncodedImage, ...]],
    ) -> dict[str, Any]:
        """Tokenize requests and return what the engine made of each, by id; skip those aborted meanwhile.

        Runs in a worker thread. Raises InvalidRequest, ContextOverflow.
        """
        return {
            id_: self.engine.sequences(self._preparation.prepare(request, compiled.get(id_), images.get(id_, ())))
            for request in requests
            if (id_ := request.request_id) in self._open
        }

    def _begin(self, prepared: Mapping[str, Any]) -> None:
        """Give requests to the engine, but not those aborted meanwhile."""
        wanted = {id_: sequences for id_, sequences in prepared.items() if id_ in self._open}
        self.engine.submit(list(wanted.values()))
        if paused := self._open.paused_of(wanted):
            self.engine.pause(paused)

    def _check_engine(self) -> None:
        """End every stream and raise ReplicaLost if the engine has failed; Serve notices some seconds later."""
        try:
            self.engine.check_engine()
        except EngineFailed as error:
            self._delivery.close()
            raise ReplicaLost("The replica cannot compute any more, and is being replaced.") from error

    def _check_adapter(self, request: GenerationRequest) -> None:
        if not self._card.has(request.model):
            must = f"name an adapter of {self._card.name} in a version that this replica serves"
            raise AdapterNotFound.refusing("model", must=must, found=f"{request.model.name} in another")

    def _end(self, request_ids: frozenset[str]) -> None:
        self._open.drop(request_ids)
        self._keeping.leave(request_ids)
        if request_ids:
            self.engine.abort(request_ids)

    def _deliver(self, deltas: list[Delta], load: Load) -> None:
        """Send a step's deltas, without failures of an engine that will not go on: what it had is lost with it."""
        if any(isinstance(delta.error, EngineFailed) for delta in deltas):
            try:
                self._check_engine()
            except ReplicaLost:
                deltas = [delta for delta in deltas if not isinstance(delta.error, EngineFailed)]
        self._keeping.note(deltas)
        self._delivery.deliver(deltas, load)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(BEAT_S, self._leases.period_s))
            with suppress(ReplicaLost):
                self._check_engine()
            self._delivery.beat(self.engine.load)
            self.detach_silent()


def described(card: ModelCard, tokenizer: TextTokenizer, length: PromptLength) -> ModelCard:
    """Return the card with what the tokenizer says of itself, and the prompts that are too long."""
    fills_gaps = tokenizer.markers is not None
    return replace(card, tokenizer=tokenizer.card, fills_gaps=fills_gaps, prompt_length=length)


def numerics_of(card: ModelCard) -> str:
    """Return what the engine says of its numbers, with what else decides how a prompt is read here; "" stays."""
    reads = repr((card.chat_template, card.tool_template, card.tool_prompt))
    digest = hashlib.blake2b(reads.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return card.numerics and f"{card.numerics} {card.max_model_len} {digest}"


def template_of(card: ModelCard, tokenizer: TextTokenizer) -> ChatTemplate:
    """Make the model's chat template, ready to render."""
    work = Work(
        template=card.chat_template,
        tool_template=card.tool_template,
        tells_form=None if card.tool_prompt == "ignore" else card.tool_parser in (None, "hermes", "qwen"),
        special_names=tuple(name for name, _ in tokenizer.special_names),
        special_tokens=dict(card.tokenizer.special_tokens),
    )
    return ChatTemplate(work, model_name=card.name)


def vocabulary_of(tokenizer: TextTokenizer, eos_token_ids: frozenset[int]) -> Vocabulary:
    """Return the tokens that constraints may use; end tokens are no part of a text."""
    known = sorted(token_id for token_id in eos_token_ids if token_id < tokenizer.vocab_size)
    pieces = [None if token_id in eos_token_ids else piece for token_id, piece in enumerate(tokenizer.pieces)]
    special = tuple((name, token_id) for name, token_id in tokenizer.special_names if token_id not in eos_token_ids)
    return Vocabulary(pieces=tuple(pieces), eos_token_ids=tuple(known), special=special)
