"""The engine: tokens in, deltas out, one step at a time. Not thread-safe; the driver owns it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from dataclasses import replace

from serve_app.core.cards import Residency
from serve_app.core.delta import Delta, FinishReason, Load
from serve_app.core.errors import AdapterUnusable, EngineFailed
from serve_app.core.log_context import about
from serve_app.engine.base import LOST, BaseEngine
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.graphs import CudaCapture
from serve_app.engine.decoder.loading import LoadedModel
from serve_app.engine.decoder.memory import host_copy_for
from serve_app.engine.decoder.runner import AsyncSteps, Recorder, Runner
from serve_app.engine.kv.store import make_store
from serve_app.engine.lora.adapter import Adapter, LowRank
from serve_app.engine.lora.pool import AdapterBank
from serve_app.engine.lora.registration import probe_slot
from serve_app.engine.lora.slots import Slots
from serve_app.engine.lora.trials import Trials, Weights
from serve_app.engine.sampling.masks import MaskComputer
from serve_app.engine.sampling.output import Output
from serve_app.engine.sampling.sampler import Sampler
from serve_app.engine.scheduler.accounting import attribute, note_ended, with_times
from serve_app.engine.scheduler.planner import Pace, work_clock
from serve_app.engine.scheduler.scheduler import Scheduler
from serve_app.engine.scheduler.sequence import Batch, Sequence
from serve_app.engine.speculation.speculator import Speculator
from serve_app.engine.speculation.verification import Verifier
from serve_app.engine.tensor_parallel.adapters import make_bank
from serve_app.engine.tensor_parallel.workers import TryAdapter
from serve_app.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


class Engine(BaseEngine):
    """Continuous batching for one base model and its adapters.

    Law: what a sequence's tokens are does not depend on what else is computed.

    runner:     what computes a batch
    speculator: what decides which guesses are computed along
    loader:     where adapters are read and copied beside the steps; None does it within a step
    on_staged:  called, in the loader's thread, when an adapter that was waited for is there
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        tokenizer: TextTokenizer,
        adapters: Items[Adapter],
        *,
        loader: Executor | None = None,
        runner: type[Runner] = Runner,
    ) -> None:
        super().__init__(config, Output(tokenizer, model.eos_token_ids, max_forced=config.max_forced_tokens))
        self.model, self._loader = model, loader
        self.bank: AdapterBank = make_bank(config, model, adapters)  # any thread may read files with it
        self._store = make_store(config, model)
        self.on_staged: Callable[[], None] = lambda: None
        self._slots = Slots(
            self.bank.num_slots, self.bank.stage, vacate=self.bank.vacate, executor=loader,
            on_staged=lambda: self.on_staged(), fits=self.bank.fits,
        )  # fmt: skip
        self.speculator = Speculator(config, model.eos_token_ids)
        self._scheduler = Scheduler(
            self._store, self._slots, policy=self._policy, accounts=self._accounts, waiting=self._waiting,
            speculator=self.speculator,
            pace=Pace(config.max_step_stretch, config.min_prompt_tokens), max_batch_tokens=config.max_batch_tokens,
            max_logit_rows=config.max_logit_rows, max_forced=config.max_forced_tokens,
            max_bypass_s=config.max_bypass_s, uses_prefixes=config.prefix_cache,
        )  # fmt: skip
        self._runner = runner(model, self._store.storage, self.bank)
        if config.graphs == "auto" and model.device.type == "cuda" and model.kernels != "torch":
            self._runner.record_steps(CudaCapture(), num_places=config.num_places)
        self._masks = MaskComputer()
        sampler = Sampler(model.eos_token_ids, land=host_copy_for(model.device))
        self._verifier = Verifier(self._masks, sampler, self._output)
        self._recorder = Recorder(model.module)
        self._steps = AsyncSteps(
            self._scheduler, self._masks, self._recorder, self._runner, self._verifier,
            runs_ahead=config.run_ahead == "auto" and model.device.type == "cuda" and model.workers is None,
        )  # fmt: skip
        self._trials = Trials(self._slots, self._probe)
        self._work_clock = work_clock(model.device.type)

    @property
    def niceness(self) -> int:
        """Return the niceness of the thread that steps; 0 where it only launches work on a device."""
        return self.config.step_niceness if self.model.device.type == "cpu" else 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._unsampled or self._trials) or self._steps.is_ahead

    @property
    def load(self) -> Load:
        return Load(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._waiting) + len(self._scheduler.paused),
            num_free_blocks=self._store.num_free_blocks + self._store.num_cached_blocks,
            num_blocks=self._store.num_blocks,
            num_cached_blocks=self._store.num_cached_blocks,
            block_bytes=self._store.bytes_per_block,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            num_drafted_tokens=self._verifier.num_drafted,
            num_accepted_tokens=self._verifier.num_accepted,
            step_s=self.step_s,
            num_generated=self._accounts.num_generated,
            spent=self._accounts.spent_since(self._num_told),
        )

    @property
    def residency(self) -> Residency:
        """Which adapter versions are in slots; may be read by any thread."""
        bank, slots = self.bank, self._slots
        known = replace(slots.residency, num_loads=slots.num_loads, num_hits=slots.num_hits)
        return replace(known, num_bytes=bank.num_bytes, max_bytes=bank.max_bytes)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def admit(self, adapter: Adapter) -> None:
        """Make one more adapter known, of whatever rank and modules; what is computed goes on with the next step."""
        if self.bank.admit(adapter):
            self._runner.renew()
            self._recorder.renew()

    def try_adapter(self, version: str, weights: dict[str, LowRank], done: Future[None]) -> None:
        """Bring a known adapter into a slot beside the steps, and compute a few tokens with it between two of them.

        weights: as they were just read;  done: fails as `Trials` says
        """
        if version not in self._slots.residency.versions:
            self.bank.offer(version, weights)
        self._trials.begin(version, self.bank.own_part(weights), done)

    def keep_adapters(self, versions: frozenset[str]) -> None:
        """Let these give way last, and no others: their files were overwritten."""
        self._slots.kept = versions

    def drop_adapters(self, versions: frozenset[str]) -> frozenset[str]:
        """Forget adapters that no sequence uses; return those of them that are gone."""
        gone = frozenset(version for version in versions if self._slots.evict(version))
        for version in gone:
            self.bank.drop(version)
        return gone

    def abort(self, request_ids: frozenset[str]) -> None:
        """End all sequences of these requests and free what they hold; those unknown are left alone."""

        def is_aborted(sequence: Sequence) -> bool:
            return sequence.request.request_id in request_ids

        self._unsampled = [sequence for sequence in self._unsampled if not is_aborted(sequence)]
        for sequence in self._scheduler.withdraw(is_aborted):
            note_ended([sequence], self._accounts)
            sequence.end(FinishReason.ABORT)
            self._scheduler.release(sequence)

    def pause(self, request_ids: frozenset[str]) -> None:
        """Take these requests out of the batch until they are resumed; those unknown are left alone."""
        self._scheduler.pause(lambda sequence: sequence.request.request_id in request_ids)

    def resume(self, request_ids: frozenset[str]) -> None:
        """Undo `pause`: these requests are next in the queue."""
        self._scheduler.resume(lambda sequence: sequence.request.request_id in request_ids)

    def reset(self) -> None:
        """Give up every sequence and all keys and values, and begin anew; no delta tells of it."""
        note_ended(self._scheduler.withdraw(lambda sequence: True), self._accounts)
        self._scheduler.clear()
        self._steps.discard()
        self._unsampled.clear()

    def check_integrity(self) -> None:
        """Assert that places, blocks and pins are conserved."""
        self._scheduler.check_integrity(self._trials.pinned)

    def check(self) -> None:
        """Raise EngineFailed where a process is gone that steps need; may be asked by any thread."""
        if self.model.workers is not None:
            self.model.workers.check()

    def close(self) -> None:
        """Give the model its own modules and attention back, and end the processes that computed it with this one."""
        self.model.downcast.stop()
        self._trials.close()
        self._runner.close()
        self.bank.unwrap()
        self._masks.close()
        if self._loader is not None:
            self._loader.shutdown(wait=False, cancel_futures=True)
        if self.model.workers is not None:
            self.model.workers.close()

    def _advance(self, deltas: list[Delta]) -> None:
        """Compute one batch; what it gives is added to `deltas` as it comes."""
        if self._trials:
            self._slots.poll()
            self._trials.advance()
        since_ns, work_started = self._accounts.now_ns(), self._work_clock()
        step = self._steps.take_launched()
        if step is None:
            batch = self._schedule(deltas)
            self.is_stalled = not batch and self.has_work
            if not batch:
                return
            work_started = self._work_clock()
            step = self._steps.launch(batch)
        self.num_steps += 1
        batch, gained = self._steps.collect(self._steps.overlap(step))
        deltas += gained
        try:
            deltas += self._settle(batch)
        finally:  # what was drawn was spent, whatever fails now
            self.step_s += attribute(batch, self._policy, self._accounts, since_ns=since_ns) / 1e9
        deltas[:] = with_times(deltas, batch)
        self._learn(batch, self._work_clock() - work_started)

    def _give_up(self) -> list[Sequence]:
        self._steps.discard()
        return self._scheduler.clear()

    def _schedule(self, deltas: list[Delta]) -> Batch:
        """Plan a step; sequences whose adapter cannot be had end with an error in `deltas`."""
        self._slots.poll()
        batch = self._scheduler.schedule()
        for sequence, reason in self._scheduler.take_failures():
            found = f"{sequence.request.model.name}: {reason}"
            error = AdapterUnusable.refusing("model", must="name an adapter that can be used", found=found)
            deltas += self._lose([sequence], error)
        return batch

    def _probe(self, slot: int, weights: Weights) -> str | None:
        """Compute a few tokens with an adapter, in all shards; return the reason to refuse it."""
        model, workers = self.model, self.model.workers
        with workers.together(TryAdapter(slot=slot)) if workers else nullcontext(), self._runner.by_itself():
            return probe_slot(model.module, self.bank, slot, weights, shard=model.shard)

    def _learn(self, batch: Batch, work_s: float) -> None:
        """Learn what steps take; from those with guesses the prompts' pace learns nothing."""
        if not batch.num_guesses:
            pace = self._scheduler.pace
            pace.note(batch.num_decoding, batch.num_prompt_tokens, work_s, beyond=batch.beyond)
        self.speculator.note(batch, work_s)

    def _settle(self, batch: Batch) -> list[Delta]:
        """Publish what was computed, start forks and release what has ended; return the errors of those that fail."""
        errors: list[Delta] = []
        for sequence in [span.sequence for span in batch.spans]:
            try:
                self._settle_one(sequence)
            except Exception:
                extra = about([sequence.request.client_request_id])
                logger.exception("%s could not be settled", sequence, extra=extra)
                errors += self._lose([sequence], EngineFailed(LOST))
                self._scheduler.let_go(sequence)
        return errors

    def _settle_one(self, sequence: Sequence) -> None:
        if sequence.is_sound and not sequence.place.is_prompt_published:
            self._scheduler.publish(sequence)
        if sequence.forks and sequence.is_prompt_computed:
            self._scheduler.start_forks(sequence)
        if sequence.is_finished:
            self._scheduler.release(sequence)
