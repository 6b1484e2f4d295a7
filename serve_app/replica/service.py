"""A replica's whole life behind the `Backend` protocol: tokenise, queue, step, and send frames back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import Context
from dataclasses import replace
from typing import Any

import torch

from serve_app.constraints.compiler import Compiled, Compiler
from serve_app.core.adapters import AdapterRecord
from serve_app.core.backend import NOTHING
from serve_app.core.cards import ModelCard, ReplicaCard
from serve_app.core.delta import Delta, Frame, Load
from serve_app.core.errors import AdapterNotFound, EngineFailed, ReplicaLost
from serve_app.core.flow_usage import UsageReport
from serve_app.core.recording import EmbeddingForm
from serve_app.core.request import GenerationRequest
from serve_app.core.tokenization import Tokenization, TokenizeRequest
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.allocator import give_back_freed_memory, settle_memory
from serve_app.engine.decoder.loading import load_with_tokenizer
from serve_app.engine.decoder.record import RecordBounds
from serve_app.engine.driver import Driver
from serve_app.engine.engine import Engine
from serve_app.engine.lora.registration import bind_adapters
from serve_app.engine.outbox import Outbox
from serve_app.engine.sampling.masks import vocabulary_of
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.engine.vision.looking import Looks, make_looking
from serve_app.kernels.openmp import Wakefulness, compute_alone
from serve_app.replica.card import model_card, template_of
from serve_app.replica.delivery import Delivery
from serve_app.replica.leases import Leases
from serve_app.replica.open_requests import OpenRequests
from serve_app.replica.preparation import Preparation
from serve_app.replica.prompt_images import placed
from serve_app.replica.tokenization import Tokenizations
from serve_app.replica.tokenizer_lanes import TokenizerLanes
from serve_app.text.tokenizer import TextTokenizer

MAX_TOLD_FLOWS = 32
"""On a replica's card, by name; all others together."""


class ModelService:
    """One replica of one base model. Lives on one event loop; the engine has a thread of its own.

    clock:  seconds, monotonic
    lanes:  the threads in which prompts are cut into tokens
    engine: once started it belongs to its thread, but its load and its counters may be read by any
    looking: what looks at images, of a model that sees
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        card: ModelCard,
        *,
        replica_id: str,
        clock: Callable[[], float] = time.monotonic,
        lanes: TokenizerLanes | None = None,
    ) -> None:
        config = engine.config
        self.engine = engine
        self.tokenizer = tokenizer
        self._preparation = Preparation(
            tokenizer,
            model_name=card.name,
            max_model_len=card.max_model_len,
            max_chars=config.max_tokenized_chars,
            eyes=engine.model.eyes,
            records=RecordBounds.of(engine.model.module, max_bytes=config.max_recorded_bytes),
        )
        self.looking = make_looking(engine.model, config)
        self._replica_id = replica_id
        self._lanes = lanes or TokenizerLanes(config.max_waiting_chars)
        self._compiler = Compiler(
            lambda: vocabulary_of(tokenizer, engine.model.eos_token_ids), encode=tokenizer.encode_literal
        )
        self._template = template_of(card, tokenizer)
        if self._template.shows_tools():
            card = replace(card, tool_prompt="template")
        self._card = replace(card, prompt_length=self._preparation.length)
        max_chars = self._preparation.max_chars
        self._tokenizations = Tokenizations(tokenizer, max_chars=max_chars, render=self._template.render)
        self._open = OpenRequests(config.max_num_sequences + config.max_waiting, clock)
        self._delivery = Delivery(
            self._open,
            end=self._end,
            make_outbox=lambda: Outbox(config.max_outbox_deltas),
            max_outbox_bytes=config.max_outbox_bytes,
        )
        self._leases = Leases(config.lease_s, clock)
        self._driver: Driver | None = None
        self._lease_task: asyncio.Task[None] | None = None
        self._wakefulness = Wakefulness()

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        adapters: Items[AdapterRecord] = (),
        *,
        replica_id: str,
        root: str | None = None,
        created: int = 0,
        dialect: str | None = None,
        chat_template: str = "",
        embedding: EmbeddingForm | None = None,
        clock: Callable[[], float] = time.monotonic,
        lanes: TokenizerLanes | None = None,
        **told: Any,
    ) -> ModelService:
        """Load the model and its adapters; blocking, call it off the event loop, then `start` on it.

        adapters: as found on disk; one that does not fit is kept with its reason and stops nothing
        root:     what clients are told of where the weights came from; None is the folder
        created, dialect, chat_template, embedding: written on the model's card, for the routers
        told:     further members of the card, as `tool_parser`; `tool_prompt` counts where the template shows no tools
        Raises ModelNotSupported.
        """
        settle_memory()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        model, tokenizer = load_with_tokenizer(config)
        bound, cards = bind_adapters(adapters, model.module, shard=model.shard, sees=model.eyes is not None)
        loader = ThreadPoolExecutor(1, thread_name_prefix="adapters", initializer=compute_alone)
        engine = Engine(config, model, tokenizer, bound, loader=loader)
        card = model_card(
            config, model, tokenizer, cards, root=root, created=created, dialect=dialect, chat_template=chat_template
        )
        card = replace(card, records=replace(card.records, embedding=embedding), **{"tool_prompt": "prompt", **told})
        return cls(engine, tokenizer, card, replica_id=replica_id, clock=clock, lanes=lanes)

    def start(self) -> None:
        """Begin to work; to be called on the event loop that serves."""
        loop = asyncio.get_running_loop()

        def deliver(deltas: list[Delta], load: Load) -> None:
            loop.call_soon_threadsafe(self._delivery.deliver, deltas, load)

        self._driver = Driver(self.engine, deliver, niceness=self.engine.niceness)
        self.engine.on_staged = self._driver.nudge
        if self.engine.model.device.type == "cpu":
            self._wakefulness.start(torch.get_num_threads())
        self._lease_task = loop.create_task(self._watch_leases(), context=Context())

    async def warm(self) -> None:
        """Do beforehand what some requests would wait for, and what makes all faster; nothing depends on it."""
        self.engine.model.narrowing.start()
        await asyncio.gather(self._compiler.warm(), self._template.warm())
        await asyncio.to_thread(give_back_freed_memory)  # what making them took for a moment

    async def close(self) -> None:
        """End the engine's thread and every stream."""
        if self._lease_task is not None:
            self._lease_task.cancel()
        self._open.clear()  # of what waits to be tokenised nothing is wanted any more
        if self._driver is not None:
            await asyncio.to_thread(self._driver.close)
            self.engine.close()
        await asyncio.to_thread(self._wakefulness.close)
        self._delivery.close()
        self._compiler.close()
        if self.looking is not None:
            await asyncio.to_thread(self.looking.close)
        self._template.close()
        await asyncio.to_thread(self._lanes.close)
        self._tokenizations.close()

    def check(self) -> None:
        """Raise EngineFailed where the engine does not get on."""
        self._running_driver().check()

    @property
    def card(self) -> ReplicaCard:
        load = self.engine.load if self._driver is None else self._driver.load
        told = self.usage.bounded(MAX_TOLD_FLOWS)
        return ReplicaCard(replica_id=self._replica_id, model=self._card, load=load, usage=told)

    @property
    def usage(self) -> UsageReport:
        """What was computed for every flow; the card names the first of them only."""
        return self.engine.usage

    @property
    def num_open(self) -> int:
        """Sequences that were accepted and have not ended."""
        return self._open.num_sequences

    async def hello(self, router_id: str, heard: Mapping[str, int] = NOTHING) -> ReplicaCard:
        self._leases.hear(router_id)
        self._check_engine()
        return replace(self.card, news=self.engine.news(heard.get(self._replica_id, 0)))

    async def attach(self, router_id: str) -> AsyncGenerator[Frame, None]:
        """Stream frames; when the stream is closed, whatever the router still has here is aborted."""
        self._check_engine()
        self._leases.hear(router_id)
        async with aclosing(self._delivery.frames(router_id)) as frames:
            async for frame in frames:
                yield frame

    async def submit(self, router_id: str, requests: Items[GenerationRequest]) -> None:
        self._check_engine()
        self._open.check_room(requests)
        for request in requests:
            self._check_adapter(request)
            self._preparation.check_length(request)  # of a conversation, which has no text yet, later
        self._leases.hear(router_id)
        self._delivery.expect(router_id)
        self._open.add(router_id, requests)
        try:
            with self._lanes.room_for(requests):
                requests = [await self._rendered(request) for request in requests]
                compiled = await self._compiler.compile_all(requests)
                looks = await self.looking.look(requests, self._open.__contains__) if self.looking else {}
                prepared = await self._lanes.run(requests, lambda: self._prepare(requests, compiled, looks))
        except BaseException:
            self._open.drop(request.request_id for request in requests)
            raise
        self._begin([sequences for sequences in prepared if sequences])

    async def abort(self, router_id: str, request_ids: Items[str]) -> None:
        self._end(self._open.among(request_ids, router_id))

    async def pause(self, router_id: str, request_ids: Items[str]) -> None:
        if known := self._open.among(request_ids, router_id):
            self._open.pause(known)
            self._running_driver().pause(known)

    async def resume(self, router_id: str, request_ids: Items[str]) -> None:
        if known := self._open.among(request_ids, router_id):
            self._open.resume(known)
            self._running_driver().resume(known)

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        return await self._tokenizations.tokenize(request)

    async def detokenize(self, token_ids: Items[int]) -> str:
        return await self._tokenizations.detokenize(token_ids)

    def detach_silent(self) -> None:
        """Detach routers that were not heard of for the lease's time; done by itself, four times in that time."""
        for router_id in self._leases.expired():
            if router_id in self._delivery:
                self._delivery.give_up(router_id, f"was not heard of for {self._leases.lease_s:.0f} s")

    async def _rendered(self, request: GenerationRequest) -> GenerationRequest:
        """The same with its conversation in the prompt's place. Raises InvalidRequest, ContextOverflow."""
        if request.conversation is None:
            return request
        rendering = await self._template.render(request.conversation)
        prompt = placed(request.conversation, rendering, self.engine.model.eyes)
        request = replace(request, prompt=prompt, conversation=None)
        self._preparation.check_length(request)
        return request

    def _prepare(
        self, requests: Items[GenerationRequest], compiled: Mapping[str, Compiled], looks: Looks
    ) -> list[list[Sequence]]:
        """Tokenise, but nothing that was aborted while it waited; in a worker thread.

        Raises InvalidRequest, ContextOverflow."""
        return [
            self._preparation.sequences(request, compiled.get(request.request_id), looks.get(request.request_id, ()))
            if request.request_id in self._open
            else []
            for request in requests
        ]

    def _begin(self, prepared: Items[list[Sequence]]) -> None:
        """Give requests to the engine, each as its sequences; not those that were aborted meanwhile."""
        by_id = {sequences[0].request.request_id: sequences for sequences in prepared}
        wanted = {id_: sequences for id_, sequences in by_id.items() if id_ in self._open}
        self._running_driver().submit(list(wanted.values()))
        if paused := self._open.paused_of(wanted):
            self._running_driver().pause(paused)

    def _check_engine(self) -> None:
        """End every stream and raise ReplicaLost once the engine is given up: Serve notices some seconds later."""
        try:
            self._running_driver().check_engine()
        except EngineFailed as error:
            self._delivery.close()
            raise ReplicaLost("The replica cannot compute any more, and is being replaced.") from error

    def _check_adapter(self, request: GenerationRequest) -> None:
        if not self._card.has(request.model):
            must = f"name an adapter of {self._card.name} in a version that this replica serves"
            raise AdapterNotFound.refusing("model", must=must, found=f"{request.model.name} in another")

    def _end(self, request_ids: frozenset[str]) -> None:
        self._open.drop(request_ids)
        if request_ids:
            self._running_driver().abort(request_ids)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(self._leases.period_s)
            self.detach_silent()

    def _running_driver(self) -> Driver:
        assert self._driver is not None, "start() was not called"
        return self._driver
