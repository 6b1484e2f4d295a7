"""What steps vLLM's engine core for our driver: our queue in front, our draws and our text behind."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from serve_app.backends.vllm.draws import KEY, Draws, Row
from serve_app.core.delta import Delta, FinishReason, Load
from serve_app.core.errors import AdapterUnusable, EngineFailed
from serve_app.engine.base import LOST, BaseEngine
from serve_app.engine.sampling.output import Output
from serve_app.engine.sampling.sampler import SampledSpan, Scored
from serve_app.engine.scheduler.accounting import attribute, note_ended, with_times
from serve_app.engine.scheduler.admission import debt_of
from serve_app.engine.scheduler.policy import Key
from serve_app.engine.scheduler.queue import Line
from serve_app.engine.scheduler.sequence import Batch, Sequence, Span

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsTensors

    from serve_app.backends.vllm.adapters import VllmAdapters
    from serve_app.engine.config import EngineConfig

logger = logging.getLogger(__name__)

FORESEEN = 64
"""Tokens that a running sequence is expected to draw at most, for whose turn is next."""


class Running:
    """A sequence that vLLM computes.

    request:      vLLM's own record of it, which tells how far it is
    num_computed: of its tokens, after the last step
    """

    __slots__ = ("num_computed", "request", "sequence")

    def __init__(self, sequence: Sequence, request: Request) -> None:
        self.sequence, self.request, self.num_computed = sequence, request, 0

    @property
    def samples(self) -> bool:
        """Whether the step that was planned last ends with its last token."""
        return bool(self.request.num_computed_tokens >= self.request.num_tokens)


class VllmCore(BaseEngine):
    """Steps vLLM and turns its steps into deltas; what the driver asks of an engine.

    The queue in front decides by virtual counters who begins next; vLLM computes all that began. So fairness holds for
    each sequence that begins, not for each step.

    core:    vLLM's, in this process
    adapters: what vLLM is to compute a sequence with
    computes_here: on the CPUs of this process
    """

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore,
        draws: Draws,
        output: Output,
        adapters: VllmAdapters,
    ) -> None:
        super().__init__(config, output)
        self.core = core
        self.computes_here = core.vllm_config.device_config.device_type == "cpu"
        self.niceness = config.step_niceness if self.computes_here else 0
        self._draws, self._adapters = draws, adapters
        self._paused: list[Sequence] = []
        self._running: dict[str, Running] = {}
        self._numbers = count()
        self._num_found = 0
        self._num_preempted = 0  # of sequences that are gone
        self._block_bytes = block_bytes_of(core)

    @property
    def has_work(self) -> bool:
        return bool(len(self._waiting) or self._running or self._unsampled)

    @property
    def load(self) -> Load:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._paused),
            num_free_blocks=pool.get_num_free_blocks(),
            num_blocks=pool.num_gpu_blocks - 1,  # one stands for none
            num_cached_blocks=None,  # vLLM would have to look at every block
            num_steps=self.num_steps,
            block_bytes=self._block_bytes,
            num_preemptions=self._num_preempted + sum(map(preemptions_of, self._running.values())),
            num_prefix_hit_tokens=self._num_found,
            step_s=self.step_s,
            num_generated=self._accounts.num_generated,
            spent=self._accounts.spent_since(self._num_told),
        )

    @property
    def versions(self) -> frozenset[str]:
        """Return the versions of adapters that sequences wait for or are computed with."""
        waiting = [*self._waiting, *self._paused, *(each.sequence for each in self._running.values())]
        return frozenset(each.request.model.version for each in waiting)

    def abort(self, request_ids: frozenset[str]) -> None:
        """End all sequences of these requests; those unknown are left alone."""
        self._unsampled = [each for each in self._unsampled if each.request.request_id not in request_ids]
        for sequence in self._withdraw(request_ids, self._paused):
            note_ended([sequence], self._accounts)
            sequence.end(FinishReason.ABORT)

    def pause(self, request_ids: frozenset[str]) -> None:
        """Take these requests out until they are resumed; what was computed of them stays in vLLM's cache."""
        self._paused += self._withdraw(request_ids, [])

    def resume(self, request_ids: frozenset[str]) -> None:
        """Undo `pause`: these requests are next in the queue."""
        for sequence in [each for each in self._paused if each.request.request_id in request_ids]:
            self._paused.remove(sequence)
            self._waiting.push_front(sequence)

    def reset(self) -> None:
        """Give up every sequence; no delta tells of it."""
        everything = lambda _: True  # noqa: E731
        note_ended([*self._waiting.remove(everything), *self._paused], self._accounts)
        note_ended(self._give_up(), self._accounts)
        self._paused.clear()
        self._unsampled.clear()

    def check_integrity(self) -> None:
        """Assert that vLLM computes nothing that nobody asked for."""
        left = self.core.scheduler.requests.keys() - self._running.keys()
        assert not left, f"vLLM still has {len(left)} requests"

    def check(self) -> None:
        """Raise EngineFailed where a process is gone that steps need; may be asked by any thread."""
        if getattr(self.core.model_executor, "is_failed", False):
            raise EngineFailed("a worker process of vLLM has ended")

    def close(self) -> None:
        self._draws.close()
        self.core.shutdown()

    def _submit(self, deltas: list[Delta]) -> None:
        """Give vLLM whose turn it is, as long as there are places; what cannot begin is added to `deltas`."""
        free = self.config.max_num_sequences - len(self._running)
        if free <= 0 or not len(self._waiting):
            return
        rules, now, owed = self._policy.rules, time.monotonic(), defaultdict[str, float](float)

        def owe(sequence: Sequence) -> None:
            owed[sequence.request.share.flow] += debt_of(sequence, rules, foreseen=FORESEEN)

        def key_of(line: Line, first: Sequence) -> Key:
            share = line.share
            kept = share.flow == self._policy.holder
            debt = owed.get(share.flow, 0.0)
            return self._policy.turn_key(share, owed=debt, since=line.since, is_kept=kept, number=line.number, now=now)

        for each in self._running.values():
            owe(each.sequence)
        for sequence in self._waiting.in_turn(key_of):
            self._waiting.take_in_turn(sequence)
            try:
                self._begin(sequence)
            except AdapterUnusable as error:
                deltas += self._lose([sequence], error)
                continue
            except Exception:  # it waits no more and does not run yet, so a step that gives up would not find it
                deltas += self._lose([sequence], EngineFailed(LOST))
                raise
            owe(sequence)
            free -= 1
            if not free:
                return

    def _begin(self, sequence: Sequence) -> None:
        number = f"{next(self._numbers)}"
        request, _ = self.core.preprocess_add_request(self._request(number, sequence))
        running = Running(sequence, request)
        request.sampling_params.extra_args[KEY] = Row(sequence, self._draws, lambda: running.samples)
        self.core.add_request(request)
        self._running[number] = running
        sequence.place.started_at = sequence.place.started_at or time.monotonic()
        sequence.num_computed = 0

    def _request(self, number: str, sequence: Sequence) -> EngineCoreRequest:
        wanted = sequence.request.logprobs
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max(1, sequence.max_tokens - sequence.num_generated),
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=wanted.prompt_top if wanted is not None and sequence.scores_prompt else None,
            skip_reading_prefix_cache=not sequence.may_skip_computed,
            extra_args={},
        )
        return EngineCoreRequest(
            request_id=number,
            prompt_token_ids=list(sequence.token_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapters.lora_of(sequence),
            cache_salt=sequence.request.cache_salt or None,
            data_parallel_rank=None,
        )

    def _advance(self, deltas: list[Delta]) -> None:
        """Compute one step; what it gives is added to `deltas`."""
        self._submit(deltas)
        if not self._running:
            return
        since_ns, running = self._accounts.now_ns(), dict(self._running)
        self._draws.begin(each.sequence for each in running.values())
        try:
            outputs, executed = self.core.step()
            self.core.post_step(model_executed=executed)
        finally:
            if any(each.sequence.request.model.adapter is not None for each in running.values()):
                self._adapters.look()
        given = {each.request_id: each for part in outputs.values() for each in part.outputs}
        spans, scored, sampled = [], [], []
        for number, each in running.items():
            span = self._span(each, given.get(number))
            if span is not None:
                result = self._result(each.sequence, given.get(number))
                spans.append(span)
                scored.append(span if not result.prompt else Span(span.sequence, 0, span.end, samples=span.samples))
                sampled.append(result)
        if not spans:
            return
        self.num_steps += 1
        batch = Batch(tuple(spans))
        deltas += self._output.commit(Batch(tuple(scored)), sampled)
        self.step_s += attribute(batch, self._policy, self._accounts, since_ns=since_ns) / 1e9
        deltas[:] = with_times(deltas, batch)
        self._settle(running)

    def _give_up(self) -> list[Sequence]:
        lost = [each.sequence for each in self._running.values()]
        self._release(list(self._running))
        return lost

    def _span(self, each: Running, output: EngineCoreOutput | None) -> Span | None:
        """Return what the step computed of a sequence; None where that was nothing."""
        sequence, before = each.sequence, each.num_computed
        is_over = output is not None and bool(output.new_token_ids)
        now = sequence.num_tokens if is_over else each.request.num_computed_tokens
        each.num_computed = now
        if now < before:  # it was preempted, and begins anew
            each.num_computed = 0
            return None
        if before == 0 and now:
            before = self._note_found(each, output)
        return Span(sequence, before, now - before, samples=is_over) if now > before else None

    def _note_found(self, each: Running, output: EngineCoreOutput | None) -> int:
        """Return how many tokens of a sequence that begins were found computed."""
        told = each.request.prefill_stats or (output.prefill_stats if output is not None else None)
        found = int(told.num_cached_tokens) if told is not None else 0
        self._num_found += found
        if not each.sequence.shown.is_prompt_reported:
            each.sequence.place.num_cached_tokens = min(found, each.sequence.prompt_length)
        return found

    def _result(self, sequence: Sequence, output: EngineCoreOutput | None) -> SampledSpan:
        prompt: tuple[Scored, ...] = ()
        if output is not None and output.new_prompt_logprobs_tensors is not None:
            wanted = sequence.request.logprobs
            ranked = wanted is not None and wanted.whole_prompt is not None
            prompt = scores_of_prompt(output.new_prompt_logprobs_tensors, ranked=ranked)[: sequence.prompt_length - 1]
        if sequence.max_tokens == 0:
            return SampledSpan(prompt=prompt)
        drawn = self._draws.results.get(id(sequence), SampledSpan())
        return SampledSpan(
            token_id=drawn.token_id,
            is_finite=drawn.is_finite,
            is_exhausted=drawn.is_exhausted,
            scored=drawn.scored,
            prompt=prompt,
        )

    def _settle(self, running: dict[str, Running]) -> None:
        """Let go of what has ended, and let others of a request follow its first once its prompt is computed."""
        for each in running.values():
            sequence = each.sequence
            if sequence.forks and sequence.is_prompt_computed:
                for fork in reversed(sequence.forks):
                    self._waiting.push_front(fork)
                sequence.forks = []
        self._release([number for number, each in running.items() if each.sequence.is_finished])

    def _release(self, numbers: Iterable[str]) -> None:
        """Have vLLM forget these requests."""
        gone = {number: self._running.pop(number) for number in numbers if number in self._running}
        self._num_preempted += sum(map(preemptions_of, gone.values()))
        if left := [number for number in gone if number in self.core.scheduler.requests]:
            self.core.abort_requests(left)

    def _withdraw(self, request_ids: frozenset[str], paused: list[Sequence]) -> list[Sequence]:
        """Take sequences of these requests out of everything, `paused` included."""
        found = self._waiting.remove(lambda sequence: sequence.request.request_id in request_ids)
        numbers = [k for k, each in self._running.items() if each.sequence.request.request_id in request_ids]
        found += [self._running[number].sequence for number in numbers]
        self._release(numbers)
        found += [each for each in paused if each.request.request_id in request_ids]
        paused[:] = [each for each in paused if each.request.request_id not in request_ids]
        return found


def preemptions_of(running: Running) -> int:
    return int(running.request.num_preemptions)


def block_bytes_of(core: EngineCore) -> int:
    """Return what a block takes of vLLM's memory for keys and values: it is of one group of layers at a time."""
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    return max((len(each.layer_names) * int(each.kv_cache_spec.page_size_bytes) for each in groups), default=0)


def scores_of_prompt(tensors: LogprobsTensors, *, ranked: bool) -> tuple[Scored, ...]:
    """Return the scores of a prompt's tokens but the first.

    tensors: token ids and log-probabilities, [tokens, 1 + top], the token itself first; ranks [tokens]
    """
    ids, logprobs = tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist()
    ranks = tensors.selected_token_ranks.tolist() if ranked else [None] * len(ids)
    return tuple(
        Scored(own, logprob, tuple(zip(others, theirs, strict=True)), rank)
        for (own, *others), (logprob, *theirs), rank in zip(ids, logprobs, ranks, strict=True)
    )
