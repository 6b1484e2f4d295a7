"""The engine: tokens in, deltas out, one step at a time. Not thread-safe; the driver owns it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items

from serve_app.core.delta import Delta, Finish, FinishReason, Load
from serve_app.core.errors import EngineFailed
from serve_app.engine.attention import PackedAttention
from serve_app.engine.config import EngineConfig
from serve_app.engine.kv.store import KeyValueStore
from serve_app.engine.loading import LoadedModel
from serve_app.engine.lora.adapter import Adapter
from serve_app.engine.lora.bank import AdapterBank
from serve_app.engine.lora.slots import Slots
from serve_app.engine.output import Output
from serve_app.engine.queue import WaitingQueue
from serve_app.engine.runner import Runner
from serve_app.engine.sampling.sampler import Sampler
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.sequence import Sequence
from serve_app.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching for one base model and its adapters.

    Law: what a sequence's tokens are does not depend on what else is computed.
    """

    def __init__(
        self, config: EngineConfig, model: LoadedModel, tokenizer: TextTokenizer, adapters: Items[Adapter]
    ) -> None:
        self.config = config
        self.model = model
        self._bank = AdapterBank(model.module, adapters, max_slots=config.max_adapters)
        self._store = make_store(config, model)
        self._slots = Slots(self._bank.num_slots, self._bank.load)
        self._scheduler = Scheduler(
            self._store,
            self._slots,
            WaitingQueue(),
            max_batch_tokens=config.max_batch_tokens,
            max_logit_rows=config.max_logit_rows,
            uses_prefixes=config.prefix_cache,
        )
        self._runner = Runner(model, PackedAttention(self._store), self._bank)
        self._sampler = Sampler(model.eos_token_ids)
        self._output = Output(tokenizer, model.eos_token_ids)
        self._unsampled: list[Sequence] = []
        self._paused: list[Sequence] = []
        self.num_steps = 0
        self.num_failed_steps = 0
        self.step_s = 0.0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._unsampled)

    @property
    def load(self) -> Load:
        return Load(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_free_blocks=self._store.num_free_blocks + self._store.num_cached_blocks,
            num_blocks=self._store.num_blocks,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            step_s=self.step_s,
        )

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def add(self, sequences: Items[Sequence]) -> None:
        """Queue the sequences of one request; the first computes the prompt, the others follow it."""
        leader, *siblings = sequences
        leader.siblings = siblings
        if leader.max_tokens == 0 and not leader.scores_prompt:
            self._unsampled.append(leader)
        else:
            self._scheduler.waiting.push(leader)

    def abort(self, request_ids: frozenset[str]) -> None:
        """End all sequences of these requests and free what they hold; those unknown are left alone."""

        def is_aborted(sequence: Sequence) -> bool:
            return sequence.request.request_id in request_ids

        self._scheduler.waiting.remove(is_aborted)
        self._unsampled = [sequence for sequence in self._unsampled if not is_aborted(sequence)]
        self._paused = [sequence for sequence in self._paused if not is_aborted(sequence)]
        for sequence in [running for running in self._scheduler.running if is_aborted(running)]:
            sequence.finish = Finish(reason=FinishReason.ABORT, matched_stop=None, num_tokens=sequence.num_generated)
            self._scheduler.release(sequence)

    def pause(self, request_ids: frozenset[str]) -> None:
        """Take these requests out of the batch and the queue until they are resumed; their blocks are given up."""
        for sequence in [one for one in self._scheduler.running if one.request.request_id in request_ids]:
            self._scheduler.preempt(sequence)
        self._paused += self._scheduler.waiting.remove(lambda one: one.request.request_id in request_ids)

    def resume(self, request_ids: frozenset[str]) -> None:
        """Put paused requests back, before all that wait."""
        for sequence in reversed([one for one in self._paused if one.request.request_id in request_ids]):
            self._paused.remove(sequence)
            self._scheduler.waiting.push_front(sequence)

    def reset(self) -> None:
        """Give up every sequence and all keys and values, and begin anew; no delta tells of it."""
        self._scheduler.clear()
        self._scheduler.waiting.remove(lambda _: True)
        self._unsampled.clear()
        self._paused.clear()

    def step(self) -> list[Delta]:
        """Compute one batch and return what every sequence gained.

        A failure ends the sequences that were running with an error each and leaves the engine empty and usable.
        """
        deltas = [delta for leader in self._unsampled for delta in self._output.finish_unsampled(leader)]
        self._unsampled.clear()
        try:
            return deltas + self._advance()
        except Exception:
            self.num_failed_steps += 1
            logger.exception("a step of %d running sequences failed", len(self._scheduler.running))
            return deltas + self._lose_running()

    def _advance(self) -> list[Delta]:
        batch = self._scheduler.schedule()
        if not batch:
            return []
        self.num_steps += 1
        started = time.perf_counter()
        logits = self._runner.forward(batch)
        sampled = self._sampler.sample(logits, batch)
        deltas = self._output.commit(batch, sampled)
        self._settle([span.sequence for span in batch.spans])
        self.step_s += time.perf_counter() - started
        return deltas

    def check_integrity(self) -> None:
        """Assert that lanes, blocks and pins are conserved."""
        self._scheduler.check_integrity()

    def _settle(self, sequences: Items[Sequence]) -> None:
        """Keep what was computed for later hits, start siblings, and release what has finished."""
        for sequence in sequences:
            is_sound = sequence.finish is None or sequence.finish.reason is not FinishReason.ERROR
            if is_sound and sequence.is_prompt_computed and sequence.num_published_blocks is None:
                self._publish(sequence, sequence.prompt_length)
            if sequence.siblings and sequence.is_prompt_computed:
                self._start_siblings(sequence)
            if sequence.is_finished:
                self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        assert sequence.finish is not None
        assert sequence.lane is not None
        if sequence.finish.reason is FinishReason.ERROR:
            self._store.wipe(sequence.lane)
        else:
            self._publish(sequence, sequence.num_computed)
        self._scheduler.release(sequence)

    def _publish(self, sequence: Sequence, num_tokens: int) -> None:
        if not self.config.prefix_cache or sequence.lane is None:
            return
        sequence.num_published_blocks = self._store.publish(
            sequence.lane,
            sequence.token_ids[:num_tokens],
            sequence.num_published_blocks or 0,
            salt=sequence.salt,
        )

    def _start_siblings(self, leader: Sequence) -> None:
        """Fork the computed prompt, all but its last token, whose logits each sibling needs for itself."""
        siblings, leader.siblings = leader.siblings, []
        shared = leader.prompt_length - 1
        waiting = [sibling for sibling in siblings if not self._scheduler.place_beside(leader, sibling, shared)]
        for sibling in reversed(waiting):
            self._scheduler.waiting.push_front(sibling)

    def _lose_running(self) -> list[Delta]:
        error = EngineFailed("the engine failed while it computed this request")
        deltas = []
        for sequence in self._scheduler.clear():
            for lost in (sequence, *sequence.siblings):
                lost.finish = Finish(reason=FinishReason.ERROR, matched_stop=None, num_tokens=lost.num_generated)
                deltas.append(Delta(request_id=lost.request.request_id, sample=lost.sample, error=error))
        return deltas


def make_store(config: EngineConfig, model: LoadedModel) -> KeyValueStore:
    """Size the key/value store by the configured bytes."""
    bytes_per_block = model.shape.bytes_per_token(model.dtype) * config.block_size
    return KeyValueStore(
        model.shape,
        num_lanes=config.max_num_sequences,
        max_model_len=model.max_model_len,
        num_blocks=config.kv_cache_bytes // bytes_per_block,
        block_size=config.block_size,
        dtype=model.dtype,
        device=model.device,
    )
