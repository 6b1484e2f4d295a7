"""A replica that computes nothing: the engine's own scheduler, store and slots. Steps last as long as they cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Items
from concurrent.futures import Executor, Future
from typing import Any, cast

from serve_app.core.cards import ModelCard, ReplicaCard
from serve_app.core.delta import Delta, FinishReason, Frame, Load, PromptReport
from serve_app.core.request import GenerationRequest
from serve_app.engine.config import EngineConfig
from serve_app.engine.kv.storage import Storage
from serve_app.engine.kv.store import KeyValueStore
from serve_app.engine.lora.slots import Slots
from serve_app.engine.scheduler.accounting import Accounts, attribute
from serve_app.engine.scheduler.planner import Pace
from serve_app.engine.scheduler.policy import FairShares
from serve_app.engine.scheduler.queue import WaitingQueue
from serve_app.engine.scheduler.scheduler import Scheduler
from serve_app.engine.scheduler.sequence import Batch, Sequence
from serve_app.whatif.costs import StepCosts, Work

TOKEN = 0


class NoContents:
    """A storage of blocks in which nothing is."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class VirtualLoader(Executor):
    """Loads one adapter after the other, as the thread of an engine does, each in the same time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, load_s: float) -> None:
        self._loop, self._load_s, self._free_at = loop, load_s, 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._free_at = max(self._free_at, self._loop.time()) + self._load_s
        self._loop.call_at(self._free_at, lambda: future.set_result(fn(*args, **kwargs)))
        return future


class SimulatedReplica:
    """What of `core.backend.Backend` a router needs, on the clock of the event loop that it is made on.

    model: its card, which replicas share
    num_computed: tokens of prompts and completions;  work: of all steps
    """

    def __init__(self, replica_id: str, model: ModelCard, config: EngineConfig, costs: StepCosts) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._id, self._model, self._costs = replica_id, model, costs
        num_blocks = costs.num_blocks
        if isinstance(config.kv_cache_bytes, int) and costs.block_bytes:
            num_blocks = max(1, config.kv_cache_bytes // costs.block_bytes)
        self.store = KeyValueStore(
            cast(Storage, NoContents()), num_blocks=num_blocks, block_size=config.block_size,
            num_places=config.num_places, num_spare=config.num_spare_places,
        )  # fmt: skip
        loader = VirtualLoader(loop, costs.load_s)
        self.slots = Slots(
            config.max_adapters, lambda slot, version: None, executor=loader, on_staged=self._wake, clock=loop.time
        )
        self._policy, self._accounts = FairShares(config.fairness), Accounts(self._now_ns)
        self._scheduler = Scheduler(
            self.store, self.slots, policy=self._policy, accounts=self._accounts,
            waiting=WaitingQueue(self._policy, clock=loop.time), clock=loop.time,
            pace=Pace(config.max_step_stretch, config.min_prompt_tokens), max_batch_tokens=config.max_batch_tokens,
            max_logit_rows=config.max_logit_rows, max_bypass_s=config.max_bypass_s, uses_prefixes=config.prefix_cache,
        )  # fmt: skip
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()
        self._is_awake = False
        self.num_steps = self.num_computed = 0
        self.work = Work()

    @property
    def card(self) -> ReplicaCard:
        return ReplicaCard(replica_id=self._id, model=self._model, load=self._load, residency=self.slots.residency)

    @property
    def max_tokens(self) -> int:
        """Of a prompt with its completion, beyond which none could ever begin."""
        return (self.store.num_blocks - 1) * self.store.block_size

    async def attach(self, router_id: str) -> AsyncGenerator[Frame]:
        """Stream frames: those with first tokens and ends, as routers decide by nothing else."""
        while True:
            yield await self._frames.get()

    async def submit(self, router_id: str, requests: Items[GenerationRequest]) -> bool:
        """Queue requests once they have made their way to the engine."""
        arrived_at = self._loop.time()
        await asyncio.sleep(self._costs.request_s)
        for request in requests:
            [ids] = request.prompt.parts
            assert isinstance(ids, tuple), "a trace has no texts"
            sequence = Sequence(
                request, ids, sample=0, max_tokens=request.stop.max_tokens or 0, detokenizer=cast(Any, None)
            )
            sequence.place.arrived_at = arrived_at
            self._scheduler.waiting.push(sequence)
        self._wake()
        return True

    @property
    def _load(self) -> Load:
        return Load(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_blocks=self.store.num_blocks,
            num_steps=self.num_steps,
        )

    def _now_ns(self) -> int:
        return int(self._loop.time() * 1e9)

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._begin_step)

    def _begin_step(self) -> None:
        """Plan a step, and end it when it has taken its time. Without one, sleep until something comes."""
        self.slots.poll()
        batch = self._scheduler.schedule()
        if not batch:
            self._is_awake = False
            return
        work = self._work_of(batch)
        self.work, step_s = self.work.plus(work), self._costs.of(work)
        self._loop.call_later(step_s, self._end_step, batch, step_s, self._now_ns())

    def _work_of(self, batch: Batch) -> Work:
        rows = [span for span in batch.spans if span.decodes]
        prompts = [span for span in batch.spans if not span.decodes]
        return Work(
            steps=1,
            prompt_tokens=sum(span.length for span in prompts),
            prompt_pairs=sum(span.length * (span.start + span.length / 2) for span in prompts),
            rows=len(rows),
            context=sum(span.start for span in rows),
            chunks=len(prompts),
            adapters=len({span.sequence.request.model.version for span in batch.spans} - {""}),
        )

    def _end_step(self, batch: Batch, step_s: float, since_ns: int) -> None:
        self.num_steps += 1
        deltas: list[Delta] = []
        for span in batch.spans:
            self.num_computed += span.length
            span.sequence.num_computed = span.end
            if span.samples:
                deltas += self._drawn(span.sequence)
        attribute(batch, self._policy, self._accounts, since_ns=since_ns)
        self._scheduler.pace.note(batch.num_decoding, batch.num_prompt_tokens, step_s, beyond=batch.beyond)
        for span in batch.spans:
            if span.sequence.is_sound and not span.sequence.place.is_prompt_published:
                self._scheduler.publish(span.sequence)
            if span.sequence.is_finished:
                self._scheduler.release(span.sequence)
        if deltas:
            self._frames.put_nowait(Frame(deltas=tuple(deltas), load=self._load))
        self._begin_step()

    def _drawn(self, sequence: Sequence) -> list[Delta]:
        """Append a token; return the delta where it is the first or the last."""
        sequence.token_ids.append(TOKEN)
        report = self._report(sequence) if sequence.num_generated == 1 else None
        finish = sequence.end(FinishReason.LENGTH) if sequence.num_generated >= sequence.max_tokens else None
        if report is None and finish is None:
            return []
        return [Delta(request_id=sequence.request.request_id, sample=0, prompt=report, finish=finish)]

    def _report(self, sequence: Sequence) -> PromptReport:
        place = sequence.place
        sequence.shown.is_prompt_reported = True
        queue_s = (place.started_at or place.arrived_at) - place.arrived_at
        return PromptReport(
            num_tokens=sequence.prompt_length, num_cached_tokens=place.num_cached_tokens, queue_s=queue_s
        )
