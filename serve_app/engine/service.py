"""A replica's whole life behind the `Backend` protocol: tokenise, queue, step, and send frames back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path

import torch

from serve_app.constraints.compiler import Compiled, Compiler
from serve_app.core.adapters import AdapterRecord
from serve_app.core.cards import ModelCard, ReplicaCard
from serve_app.core.delta import Delta, Frame, Load
from serve_app.core.errors import AdapterNotFound, EngineFailed, Overloaded
from serve_app.core.request import GenerationRequest
from serve_app.core.tokenization import Tokenization, TokenizeRequest
from serve_app.engine.config import EngineConfig
from serve_app.engine.departures import Departures
from serve_app.engine.driver import Driver
from serve_app.engine.engine import Engine
from serve_app.engine.leases import Leases
from serve_app.engine.loading import load_model
from serve_app.engine.lora.registration import bind_adapters
from serve_app.engine.masks import vocabulary_of
from serve_app.engine.outbox import Outbox
from serve_app.engine.preparation import Preparation
from serve_app.engine.sequence import Sequence
from serve_app.engine.tokenization import Tokenizations
from serve_app.engine.tokenizer_lanes import TokenizerLanes
from serve_app.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Held:
    """A request that was accepted: whose it is, and which of its samples have not ended."""

    router_id: str
    unfinished: set[int]
    is_paused: bool = False


class ModelService:
    """One replica of one base model. Lives on one event loop; the engine has a thread of its own.

    clock: seconds, monotonic
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        card: ModelCard,
        *,
        replica_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = engine.config
        self._preparation = Preparation(
            tokenizer,
            model_name=card.name,
            max_model_len=card.max_model_len,
            max_chars=engine.config.max_tokenized_chars,
        )
        self._card = card
        self._replica_id = replica_id
        self._lanes = TokenizerLanes()
        self._compiler = Compiler(
            lambda: vocabulary_of(tokenizer, engine.model.eos_token_ids), encode=tokenizer.encode_literal
        )
        self._tokenizations = Tokenizations(tokenizer, max_chars=self._preparation.max_chars)
        self._outboxes: dict[str, Outbox] = {}
        self._leases = Leases(engine.config.lease_s, clock)
        self._departures = Departures(clock)
        self._live: dict[str, _Held] = {}  # by request id
        self._driver: Driver | None = None
        self._lease_task: asyncio.Task[None] | None = None

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        adapters: Items[AdapterRecord] = (),
        *,
        replica_id: str,
        root: str | None = None,
        dialect: str | None = None,
        chat_template: str = "",
    ) -> ModelService:
        """Load the model and its adapters; blocking, call it off the event loop, then `start` on it.

        adapters: as found on disk; one that does not fit is kept with its reason and stops nothing
        root:     what clients are told of where the weights came from; None is the folder
        dialect, chat_template: written on the model's card, for the routers

        Raises ModelNotSupported.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        model = load_model(config)
        tokenizer = TextTokenizer.load(Path(config.path), vocab_size=model.vocab_size)
        bound, cards = bind_adapters(adapters, model.module)
        loader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        engine = Engine(config, model, tokenizer, bound, loader=loader)
        weights = max(Path(config.path).glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        card = ModelCard(
            name=config.name,
            root=root or config.path,
            created=int(weights.stat().st_mtime),
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            adapters=cards,
            dialect=dialect,
            max_num_sequences=config.max_num_sequences,
            max_waiting=config.max_waiting,
            kv_cache_bytes=model.kv_cache_bytes,
            chat_template=chat_template,
        )
        return cls(engine, tokenizer, card, replica_id=replica_id)

    def start(self) -> None:
        """Begin to work; to be called on the event loop that serves."""
        loop = asyncio.get_running_loop()

        def deliver(deltas: list[Delta], load: Load) -> None:
            loop.call_soon_threadsafe(self._deliver, deltas, load)

        self._driver = Driver(self._engine, deliver)
        self._engine.on_staged = self._driver.nudge
        self._lease_task = loop.create_task(self._watch_leases(), context=Context())

    async def close(self) -> None:
        """End the engine's thread and every stream."""
        if self._lease_task is not None:
            self._lease_task.cancel()
        self._live.clear()  # of what waits to be tokenised nothing is wanted any more
        if self._driver is not None:
            await asyncio.to_thread(self._driver.close)
            self._engine.close()
        for outbox in self._outboxes.values():
            outbox.close()
        self._compiler.close()
        await asyncio.to_thread(self._lanes.close)
        self._tokenizations.close()

    def check(self) -> None:
        """Raise EngineFailed where the engine does not get on."""
        self._running_driver().check()

    @property
    def card(self) -> ReplicaCard:
        load = self._engine.load if self._driver is None else self._driver.load
        return ReplicaCard(replica_id=self._replica_id, model=self._card, load=load)

    async def hello(self, router_id: str) -> ReplicaCard:
        self._leases.hear(router_id)
        return self.card

    async def attach(self, router_id: str) -> AsyncGenerator[Frame, None]:
        """Stream frames; when the stream is closed, whatever the router still has here is aborted."""
        self._leases.hear(router_id)
        if router_id in self._outboxes and self._outboxes[router_id].has_reader:
            self._detach(router_id)
        outbox = self._outbox(router_id)
        try:
            async for frame in outbox.frames():
                yield frame
        finally:
            if self._outboxes.get(router_id) is outbox:
                self._detach(router_id)

    async def submit(self, router_id: str, requests: Items[GenerationRequest]) -> None:
        self._check_room(requests)
        for request in requests:
            self._check_adapter(request)
            self._preparation.check_length(request)
        self._leases.hear(router_id)
        self._outbox(router_id)  # its stream may still be on the way
        for request in requests:
            self._live[request.request_id] = _Held(router_id=router_id, unfinished=set(range(request.n)))
        try:
            compiled = [await self._compiled(request) for request in requests]
            prepared = await self._lanes.run(requests, lambda: self._prepare(requests, compiled))
        except BaseException:
            for request in requests:
                self._live.pop(request.request_id, None)
            raise
        wanted = {one[0].request.request_id: one for one in prepared if one}
        wanted = {id_: sequences for id_, sequences in wanted.items() if id_ in self._live}  # not aborted meanwhile
        self._running_driver().submit(list(wanted.values()))
        if paused := frozenset(id_ for id_ in wanted if self._live[id_].is_paused):
            self._running_driver().pause(paused)

    async def abort(self, router_id: str, request_ids: Items[str]) -> None:
        self._end(self._owned(router_id, request_ids))

    async def pause(self, router_id: str, request_ids: Items[str]) -> None:
        known = self._owned(router_id, request_ids)
        for request_id in known:
            self._live[request_id].is_paused = True
        if known:
            self._running_driver().pause(known)

    async def resume(self, router_id: str, request_ids: Items[str]) -> None:
        known = self._owned(router_id, request_ids)
        for request_id in known:
            self._live[request_id].is_paused = False
        if known:
            self._running_driver().resume(known)

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        return await self._tokenizations.tokenize(request)

    async def detokenize(self, token_ids: Items[int]) -> str:
        return await self._tokenizations.detokenize(token_ids)

    async def _compiled(self, request: GenerationRequest) -> Compiled | None:
        """Raises InvalidRequest where the constraint is not taken."""
        return None if request.constraint is None else await self._compiler.compile(request.constraint)

    def _prepare(self, requests: Items[GenerationRequest], compiled: Items[Compiled | None]) -> list[list[Sequence]]:
        """Tokenise, but nothing that was aborted while it waited; runs in a worker thread.

        Raises InvalidRequest, ContextOverflow.
        """
        return [
            self._preparation.sequences(request, own) if request.request_id in self._live else []
            for request, own in zip(requests, compiled, strict=True)
        ]

    def _check_room(self, requests: Items[GenerationRequest]) -> None:
        num_wanted = sum(request.n for request in requests)
        num_held = sum(len(held.unfinished) for held in self._live.values())
        room = self._config.max_num_sequences + self._config.max_waiting
        if num_wanted + num_held > room:
            wait_s = self._departures.wait_s(num_wanted + num_held - room)
            raise Overloaded(
                f"{num_wanted} more completions do not fit the queue of {room}", None, {"retry_after_s": wait_s}
            )

    def _check_adapter(self, request: GenerationRequest) -> None:
        model = request.model
        if model.adapter is None:
            return
        card = self._card.adapter(model.adapter)
        if card is None or not card.is_usable or card.version != model.version:
            raise AdapterNotFound(f"adapter {model.name} is not served in the version asked for", "model")

    def _deliver(self, deltas: list[Delta], load: Load) -> None:
        """Sort a step's deltas by router; runs on the event loop. What fails for one router concerns no other."""
        by_router: dict[str, list[Delta]] = {}
        for delta in deltas:
            held = self._live.get(delta.request_id)
            if held is None:
                continue  # aborted while the step ran
            by_router.setdefault(held.router_id, []).append(delta)
            if delta.finish is not None or delta.error is not None:
                self._note_end(delta, held)
        for router_id, own in by_router.items():
            try:
                self._send(router_id, own, load)
            except Exception:
                logger.exception("the deltas for router %s could not be sent; its stream ends", router_id)
                self._detach(router_id)

    def _note_end(self, delta: Delta, held: _Held) -> None:
        self._departures.note()
        held.unfinished.discard(delta.sample)
        if not held.unfinished:
            del self._live[delta.request_id]

    def _send(self, router_id: str, deltas: Items[Delta], load: Load) -> None:
        outbox = self._outboxes[router_id]
        outbox.put(deltas, load)
        if outbox.num_bytes > self._config.max_outbox_bytes:
            logger.error("router %s left %d bytes unread; its requests are ended", router_id, outbox.num_bytes)
            self._shed(router_id, outbox, load)

    def _shed(self, router_id: str, outbox: Outbox, load: Load) -> None:
        """Put one error per sequence in place of all that a router has not read, and end what it has here."""
        error = EngineFailed(f"The router did not read its results: more than {self._config.max_outbox_bytes} bytes.")
        lost = {(delta.request_id, delta.sample) for delta in outbox.drop()}
        mine = frozenset(id_ for id_, held in self._live.items() if held.router_id == router_id)
        lost |= {(id_, sample) for id_ in mine for sample in self._live[id_].unfinished}
        self._end(mine)
        outbox.put([Delta(request_id=id_, sample=sample, error=error) for id_, sample in sorted(lost)], load)

    def _outbox(self, router_id: str) -> Outbox:
        return self._outboxes.setdefault(router_id, Outbox(self._config.max_outbox_deltas))

    def _owned(self, router_id: str, request_ids: Items[str]) -> frozenset[str]:
        """Those of these requests that are here and belong to the router."""
        return frozenset(id_ for id_ in request_ids if id_ in self._live and self._live[id_].router_id == router_id)

    def _end(self, request_ids: frozenset[str]) -> None:
        for request_id in request_ids:
            del self._live[request_id]
        if request_ids:
            self._running_driver().abort(request_ids)

    def _detach(self, router_id: str) -> None:
        """Close a router's stream and abort what it has here."""
        if (outbox := self._outboxes.pop(router_id, None)) is not None:
            outbox.close()
        self._end(frozenset(id_ for id_, held in self._live.items() if held.router_id == router_id))

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(self._leases.period_s)
            self._detach_silent()

    def _detach_silent(self) -> None:
        """Detach routers that have not been heard of for the lease's time."""
        for router_id in self._leases.expired():
            if router_id in self._outboxes:
                logger.warning("router %s was not heard of for %.0f s", router_id, self._leases.lease_s)
                self._detach(router_id)

    def _running_driver(self) -> Driver:
        assert self._driver is not None, "start() was not called"
        return self._driver
