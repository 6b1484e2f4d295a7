"""A replica's whole life behind the `Backend` protocol: tokenise, queue, step, and send frames back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import replace
from pathlib import Path

import torch

from serve_app.core.cards import AdapterCard, ModelCard, ReplicaCard
from serve_app.core.delta import Delta, Frame, Load
from serve_app.core.errors import AdapterNotFound, Overloaded
from serve_app.core.request import GenerationRequest
from serve_app.core.tokenization import Tokenization, TokenizeRequest
from serve_app.engine.config import EngineConfig
from serve_app.engine.driver import Driver
from serve_app.engine.engine import Engine
from serve_app.engine.loading import load_model
from serve_app.engine.lora.adapter import Adapter, AdapterRefused, load_adapter
from serve_app.engine.outbox import Outbox
from serve_app.engine.preparation import Preparation
from serve_app.engine.sequence import Sequence
from serve_app.engine.tokenization import Tokenizations
from serve_app.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

TOKENIZER_THREADS = 2


class ModelService:
    """One replica of one base model. Lives on one event loop; the engine has a thread of its own."""

    def __init__(
        self, engine: Engine, tokenizer: TextTokenizer, card: ModelCard, *, replica_id: str, lease_s: float
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._preparation = Preparation(tokenizer, model_name=card.name, max_model_len=card.max_model_len)
        self._card = card
        self._replica_id = replica_id
        self._lease_s = lease_s
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._tokenizations = Tokenizations(tokenizer)
        self._load = Load()
        self._outboxes: dict[str, Outbox] = {}
        self._heard_at: dict[str, float] = {}
        self._live: dict[str, tuple[str, int]] = {}  # request id -> its router, its unfinished sequences
        self._driver: Driver | None = None
        self._lease_task: asyncio.Task[None] | None = None

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        adapters: Items[AdapterCard] = (),
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
        bound, cards = _bind_adapters(adapters, model.module)
        engine = Engine(config, model, tokenizer, bound)
        weights = max(Path(config.path).glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        card = ModelCard(
            name=config.name,
            root=root or config.path,
            created=int(weights.stat().st_mtime),
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            adapters=cards,
            dialect=dialect,
            chat_template=chat_template,
        )
        return cls(engine, tokenizer, card, replica_id=replica_id, lease_s=config.lease_s)

    def start(self) -> None:
        """Begin to work; to be called on the event loop that serves."""
        loop = asyncio.get_running_loop()

        def deliver(deltas: list[Delta], load: Load) -> None:
            loop.call_soon_threadsafe(self._deliver, deltas, load)

        self._driver = Driver(self._engine, deliver)
        self._lease_task = loop.create_task(self._watch_leases(), context=Context())

    async def close(self) -> None:
        """End the engine's thread and every stream."""
        if self._lease_task is not None:
            self._lease_task.cancel()
        if self._driver is not None:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._driver.close)
        for outbox in self._outboxes.values():
            outbox.close()
        self._pool.shutdown()
        self._tokenizations.close()

    def check(self) -> None:
        """Raise EngineFailed where the engine does not get on."""
        self._running_driver().check()

    @property
    def card(self) -> ReplicaCard:
        return ReplicaCard(replica_id=self._replica_id, model=self._card, load=self._load)

    async def hello(self, router_id: str) -> ReplicaCard:
        self._heard_at[router_id] = time.monotonic()
        return self.card

    async def attach(self, router_id: str) -> AsyncGenerator[Frame, None]:
        """Stream frames; when the stream is closed, whatever the router still has here is aborted."""
        self._heard_at[router_id] = time.monotonic()
        if router_id in self._outboxes and self._outboxes[router_id].has_reader:
            self._detach(router_id)
        outbox = self._outboxes.setdefault(router_id, Outbox())
        try:
            async for frame in outbox.frames():
                yield frame
        finally:
            if self._outboxes.get(router_id) is outbox:
                self._detach(router_id)

    async def submit(self, router_id: str, requests: Items[GenerationRequest]) -> None:
        num_sequences = sum(request.n for request in requests)
        room = self._engine.config.max_num_sequences + self._engine.config.max_waiting
        if num_sequences + sum(count for _, count in self._live.values()) > room:
            raise Overloaded(
                f"{num_sequences} more completions do not fit the queue of {room}", None, {"retry_after_s": 1}
            )
        for request in requests:
            self._check_adapter(request)
        self._heard_at[router_id] = time.monotonic()
        self._outboxes.setdefault(router_id, Outbox())  # its stream may still be on the way
        self._live.update({request.request_id: (router_id, request.n) for request in requests})
        loop = asyncio.get_running_loop()
        try:
            prepared = await loop.run_in_executor(self._pool, self._prepare, requests)
        except BaseException:
            for request in requests:
                self._live.pop(request.request_id, None)
            raise
        wanted = [
            sequences
            for request, sequences in zip(requests, prepared, strict=True)
            if request.request_id in self._live  # not aborted meanwhile
        ]
        self._running_driver().submit(wanted)

    async def abort(self, router_id: str, request_ids: Items[str]) -> None:
        known = frozenset(id_ for id_ in request_ids if id_ in self._live and self._live[id_][0] == router_id)
        for request_id in known:
            del self._live[request_id]
        if known:
            self._running_driver().abort(known)

    async def tokenize(self, request: TokenizeRequest) -> Tokenization:
        return await self._tokenizations.tokenize(request)

    async def detokenize(self, token_ids: Items[int]) -> str:
        return await self._tokenizations.detokenize(token_ids)

    def _prepare(self, requests: Items[GenerationRequest]) -> list[list[Sequence]]:
        """Tokenise; runs in a worker thread.

        Raises InvalidRequest, ContextOverflow.
        """
        return [self._preparation.sequences(request) for request in requests]

    def _check_adapter(self, request: GenerationRequest) -> None:
        model = request.model
        if model.adapter is None:
            return
        card = self._card.adapter(model.adapter)
        if card is None or not card.is_usable or card.version != model.version:
            raise AdapterNotFound(f"adapter {model.name} is not served in the version asked for", "model")

    def _deliver(self, deltas: list[Delta], load: Load) -> None:
        """Sort a step's deltas by router; runs on the event loop."""
        self._load = load
        by_router: dict[str, list[Delta]] = {}
        for delta in deltas:
            owner = self._live.get(delta.request_id)
            if owner is None:
                continue  # aborted while the step ran
            router_id, num_unfinished = owner
            by_router.setdefault(router_id, []).append(delta)
            if delta.finish is not None or delta.error is not None:
                if num_unfinished == 1:
                    del self._live[delta.request_id]
                else:
                    self._live[delta.request_id] = (router_id, num_unfinished - 1)
        for router_id, own in by_router.items():
            if router_id in self._outboxes:
                self._outboxes[router_id].put(own, load)

    def _detach(self, router_id: str) -> None:
        """Close a router's stream and abort what it has here."""
        self._outboxes.pop(router_id).close()
        orphans = frozenset(id_ for id_, (owner, _) in self._live.items() if owner == router_id)
        for request_id in orphans:
            del self._live[request_id]
        if orphans:
            self._running_driver().abort(orphans)

    async def _watch_leases(self) -> None:
        """Detach routers that have not been heard of for the lease's time."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            deadline = time.monotonic() - self._lease_s
            for router_id in [id_ for id_, heard_at in self._heard_at.items() if heard_at < deadline]:
                del self._heard_at[router_id]
                if router_id in self._outboxes:
                    logger.warning("router %s was not heard of for %.0f s", router_id, self._lease_s)
                    self._detach(router_id)

    def _running_driver(self) -> Driver:
        assert self._driver is not None, "start() was not called"
        return self._driver


def _bind_adapters(found: Items[AdapterCard], module: torch.nn.Module) -> tuple[list[Adapter], tuple[AdapterCard, ...]]:
    """Load every adapter that fits; give all cards, those that do not fit with the reason."""
    bound: list[Adapter] = []
    cards: list[AdapterCard] = []
    for card in found:
        if card.is_usable:
            try:
                adapter = load_adapter(Path(card.root), version=card.version, model=module)
            except AdapterRefused as error:
                card = replace(card, reason=str(error))
            except Exception as error:  # whatever is wrong with one adapter's files, the model is served
                logger.exception("adapter %s could not be read", card.name)
                card = replace(card, reason=f"its files could not be read: {error}")
            else:
                bound.append(adapter)
                card = replace(card, rank=adapter.rank)
        if not card.is_usable:
            logger.warning("adapter %s is refused: %s", card.name, card.reason)
        cards.append(card)
    return bound, tuple(cards)
