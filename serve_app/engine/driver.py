"""The driver runs the engine in a thread of its own and passes commands and deltas between threads.

`ReplicaEngine` is the engine with its driver, as a replica calls it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import torch

from serve_app.core.cards import EVERYTHING, AdapterCard, AdapterRecord, ModelCard, Residency
from serve_app.core.delta import Delta
from serve_app.core.errors import EngineFailed
from serve_app.core.ledger import News, UsageReport
from serve_app.core.log_context import about
from serve_app.core.machine import Throttle, give_way
from serve_app.core.names import MAX_MIXED_ADAPTERS
from serve_app.core.weight_files import weights_sample
from serve_app.engine.config import EngineConfig
from serve_app.engine.decoder.loading import load_with_tokenizer
from serve_app.engine.decoder.memory import Leftovers, give_back_freed_memory, settle_memory
from serve_app.engine.decoder.record import Record, RecordBounds, record_card
from serve_app.engine.engine import Engine
from serve_app.engine.lora.matching import Matcher
from serve_app.engine.lora.registration import bind_adapters
from serve_app.engine.lora.staging import Staging, cards_that_fit, matcher_of
from serve_app.engine.sampling.output import PERIOD_S, Period
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.engine.vision.encoder import image_card, make_encoder
from serve_app.engine.vision.images import PlacedImages, place_images
from serve_app.kernels.openmp import Wakefulness, compute_alone
from serve_app.replica.engine import Deliver, PreparedRequest
from serve_app.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

STALL_S = 120.0
MAX_FAILURES_IN_A_ROW = 20
MAX_BACKOFF_S = 0.05
STALLED_S = 0.05
"""An engine that waits for something sleeps so long until it looks again, unless it is nudged."""
SILENCE_S = 2 * PERIOD_S
"""For so long routers are told nothing of what is spent unless there is something else to tell."""
Command = Callable[[frozenset[str]], None]
"""Something that other threads ask of the engine, about these requests."""


class Driver:
    """Steps an engine in a thread of its own for as long as there is work, and survives whatever fails there.

    A turn of its loop:

    1. carry out what other threads asked;
    2. compute a step;
    3. end requests that the engine has forgotten;
    4. deliver deltas and load;
    5. if nothing is left to compute, give memory back and check that nothing was left behind.

    What fails is logged and counted. Its requests end with EngineFailed: if a command or a delivery fails, those it was
    about; if a step or an integrity check fails, all, and the engine begins anew. After twenty failures in a row
    without a good step `check` gives the engine up.

    niceness:      of that thread, beside its process's
    computes_here: on the CPUs of this process, whose threads then stay awake between two parts of a step
    load:          of the engine after its last step; may be read by any thread
    """

    def __init__(
        self,
        engine: Engine,
        *,
        niceness: int = 0,
        computes_here: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._deliver: Deliver = lambda deltas, load: None
        self._niceness = niceness
        self._wakefulness = Wakefulness() if computes_here else None
        self._clock = clock
        self._leftovers = Leftovers(clock)
        self._checks = Throttle(clock)
        self._silence = Period(clock, SILENCE_S)
        self._inbox: deque[tuple[tuple[Command, ...], frozenset[str]]] = deque()  # and the requests they are about
        self._open = OpenSequences()
        self._outgoing: list[Delta] = []
        self._wake = threading.Condition()
        self._is_closing = False
        self._busy_since: float | None = None
        self._num_failures = 0
        self._num_failures_in_a_row = 0
        self.load = engine.load
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, deliver: Deliver) -> None:
        """Begin to step; call it once.

        deliver: called in the thread with everything a step gave and with how busy the engine is then; also after a
                 step that gave nothing: behind an abort, and now and then where something was spent
        """
        self._deliver = deliver
        self._thread.start()
        if self._wakefulness is not None:
            self._wakefulness.start(torch.get_num_threads())

    def submit(self, requests: Items[Items[Sequence]]) -> None:
        """Queue requests, each as its sequences, before the next step."""
        for sequences in requests:
            self._post(frozenset((sequences[0].request.request_id,)), *self._adding(sequences))

    def take_over(self, sequences: Items[Sequence]) -> None:
        """Have sequences of a new request go on where they were begun elsewhere, if they were; any thread may ask."""
        for sequence in sequences:
            if sequence.request.continued or sequence.request.is_reported:
                self._engine.go_on(sequence)

    def abort(self, request_ids: frozenset[str]) -> None:
        """End requests before the next step."""
        self._post(request_ids, self._open.end, self._engine.abort)

    def pause(self, request_ids: frozenset[str]) -> None:
        """Take requests out of the batch until they are resumed; those unknown are left alone."""
        self._post(request_ids, self._open.pause, self._engine.pause)

    def resume(self, request_ids: frozenset[str]) -> None:
        """Let paused requests go on."""
        self._post(request_ids, self._open.resume, self._engine.resume)

    def nudge(self, *commands: Command) -> None:
        """Let the engine look again at once whether it can go on, after commands that its thread carries out first."""
        self._post(frozenset(), *commands)

    @property
    def usage(self) -> UsageReport:
        return self._engine.usage

    def check(self) -> None:
        """Raise EngineFailed as `check_engine`, or if the engine is too long in one step."""
        self.check_engine()
        busy_since = self._busy_since
        if busy_since is not None and self._clock() - busy_since > STALL_S:
            raise EngineFailed(f"the engine has been in one step for more than {STALL_S:.0f} s")

    def check_engine(self) -> None:
        """Raise EngineFailed if the engine will not go on: its thread is dead, it only fails, or it says so."""
        self._engine.check()
        if not self._thread.is_alive():
            raise EngineFailed("the engine's thread is not running")
        if self._num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineFailed(f"the engine has failed {self._num_failures_in_a_row} times in a row")

    def close(self) -> None:
        """Stop after the current step and wait for the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()
        if self._wakefulness is not None:
            self._wakefulness.close()

    def _adding(self, sequences: Items[Sequence]) -> tuple[Command, Command]:
        """Return what adds the sequences of one request."""
        request, samples = sequences[0].request, [each.sample for each in sequences]
        begin = partial(self._open.begin, request.request_id, samples, client_request_id=request.client_request_id)
        return lambda _: begin(), lambda _: self._engine.add(sequences)

    def _post(self, request_ids: frozenset[str], *commands: Command) -> None:
        """Have the thread carry out commands, in their order, before its next step."""
        with self._wake:
            self._inbox.append((commands, request_ids))
            self._wake.notify()

    def _run(self) -> None:
        give_way(self._niceness)
        torch.get_num_threads()  # the thread takes over torch's number, for kernels that ask OpenMP alone
        while not self._is_closing:
            try:
                if self._wait_for_work():
                    self._busy_since = self._clock()
                    self._turn()
            except Exception:
                self._note_failure("the engine could not be brought back after a failure", requests_of(self._outgoing))
            self._busy_since = None

    def _turn(self) -> None:
        """Carry out what was asked, compute a step, and send what came of both."""
        is_news = self._carry_out_commands()
        self._step()
        self._find_forgotten()
        self._send(is_news=is_news)
        self._leftovers.look(is_idle=not self._engine.has_work)
        self._check_integrity()

    def _carry_out_commands(self) -> bool:
        """Return whether there were any; what comes while others are carried out counts."""
        found = False
        while self._inbox:
            found = True
            commands, request_ids = self._inbox.popleft()
            try:
                for command in commands:
                    command(request_ids)
            except Exception:
                self._note_failure("a command to the engine failed", request_ids)
                self._lose(request_ids, "the engine failed while it took this request")
        return found

    def _step(self) -> None:
        had_work, num_failed_before = self._engine.has_work, self._engine.num_failed_steps
        try:
            deltas = self._engine.step()
        except Exception:
            self._note_failure("a step of the engine failed", self._open.request_ids)
            self._begin_anew()
            return
        self._outgoing += self._open.take(deltas)
        if self._engine.num_failed_steps > num_failed_before:
            self._num_failures_in_a_row += 1
        elif had_work:
            self._num_failures_in_a_row = 0

    def _check_integrity(self) -> None:
        """If there is nothing left to compute, check that nothing was left behind, among all blocks there are."""
        if self._engine.has_work or self._inbox or not self._checks.is_due:
            return
        try:
            with self._checks.spending():
                self._engine.check_integrity()
        except Exception:
            self._note_failure("the engine's places, blocks or pins do not add up", self._open.request_ids)
            self._begin_anew()

    def _find_forgotten(self) -> None:
        """If there is nothing left to compute, end requests that still wait."""
        if not self._engine.has_work and (forgotten := self._open.active_request_ids):
            self._note_failure(f"the engine forgot {len(forgotten)} requests", forgotten)
            self._lose(forgotten, "the engine lost this request")

    def _send(self, *, is_news: bool) -> None:
        self.load = replace(self._engine.load, num_failures=self._num_failures + self._engine.num_failed_steps)
        deltas, self._outgoing = self._outgoing, []
        if not (deltas or is_news or (self.load.spent and self._silence.is_over)):
            return
        self._silence.begin()
        try:
            self._deliver(deltas, self.load)
        except Exception:
            self._note_failure("a step's deltas could not be delivered", requests_of(deltas))
            self._lose_undelivered(deltas)
        else:
            self._open.note_told()
            self._engine.note_told()

    def _lose_undelivered(self, deltas: list[Delta]) -> None:
        """End the requests whose results now have a gap; the next delivery tells them."""
        error = EngineFailed("the engine's results for this request were lost")
        ended = {(d.request_id, d.sample) for d in deltas if d.finish is not None or d.error is not None}
        self._outgoing += [Delta(request_id=id_, sample=sample, error=error) for id_, sample in sorted(ended)]
        self._lose(requests_of(deltas), error.message)

    def _lose(self, request_ids: frozenset[str], reason: str) -> None:
        """End requests with an error each."""
        self._outgoing += self._open.lose(request_ids, EngineFailed(reason))
        try:
            self._engine.abort(request_ids)
        except Exception:
            self._note_failure("requests could not be ended", request_ids | self._open.request_ids)
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Empty the engine; all that it was computing ends with an error."""
        error = EngineFailed("the engine failed while it computed this request")
        self._outgoing += self._open.lose(self._open.request_ids, error)
        self._engine.reset()

    def _note_failure(self, what: str, request_ids: frozenset[str]) -> None:
        """Log and count a failure, in an exception's handler or outside.

        The line names the requests as clients know them, the oldest of many.
        """
        self._num_failures += 1
        self._num_failures_in_a_row += 1
        facts = (what, self._num_failures_in_a_row, len(request_ids))
        extra, exc_info = about(self._open.names_of(request_ids)), sys.exception() is not None
        logger.error("%s (%d in a row, of %d requests)", *facts, exc_info=exc_info, extra=extra)

    def _has_work(self) -> bool:
        """Return whether there is something to do. Paused sequences alone are no work, though the engine holds them."""
        return bool(self._inbox or self._outgoing or (self._open.may_go_on and self._engine.has_work))

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do, a moment longer after a failure; False when closing."""
        with self._wake:
            if self._num_failures_in_a_row:
                backoff_s = min(MAX_BACKOFF_S, 0.001 * 2 ** min(self._num_failures_in_a_row, 10))
                self._wake.wait_for(lambda: self._is_closing, timeout=backoff_s)
            if self._engine.is_stalled:
                self._wake.wait_for(lambda: self._inbox or self._is_closing, timeout=STALLED_S)
            self._wake.wait_for(lambda: self._has_work() or self._is_closing)
            return not self._is_closing


class OpenSequences:
    """Sequences that were begun and have not ended: each is owed exactly one finish or one error.

    What a client knows a request by is kept until its ending was told.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._ended: list[str] = []
        self._samples: dict[str, set[int]] = {}  # that have not ended, by request
        self._paused: set[str] = set()

    @property
    def may_go_on(self) -> bool:
        """Whether any may be computed further; True also if there are none at all."""
        return len(self._samples) > len(self._paused) or not self._paused

    @property
    def request_ids(self) -> frozenset[str]:
        return frozenset(self._samples)

    @property
    def active_request_ids(self) -> frozenset[str]:
        return frozenset(self._samples.keys() - self._paused)

    def begin(self, request_id: str, samples: Iterable[int], *, client_request_id: str = "") -> None:
        self._names[request_id] = client_request_id
        self._samples[request_id] = set(samples)

    def names_of(self, request_ids: AbstractSet[str]) -> list[str]:
        """Return what clients know these requests by, the oldest first, of those whose ending was not told yet."""
        return [name for request_id, name in self._names.items() if request_id in request_ids]

    def note_told(self) -> None:
        """Note that every ending until now has reached whoever waits for it."""
        for request_id in self._ended:
            self._names.pop(request_id, None)
        self._ended.clear()

    def take(self, deltas: Iterable[Delta]) -> list[Delta]:
        """Return the deltas of open sequences, and note the endings among them."""
        taken = []
        for delta in deltas:
            samples = self._samples.get(delta.request_id, set())
            if delta.sample not in samples:
                continue  # it was told another ending already
            taken.append(delta)
            if delta.finish is not None or delta.error is not None:
                samples.remove(delta.sample)
                if not samples:
                    self.end((delta.request_id,))
        return taken

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests whose end no client waits for."""
        for request_id in request_ids:
            self._ended.append(request_id)
            self._samples.pop(request_id, None)
            self._paused.discard(request_id)

    def pause(self, request_ids: AbstractSet[str]) -> None:
        self._paused |= request_ids & self._samples.keys()

    def resume(self, request_ids: AbstractSet[str]) -> None:
        self._paused -= request_ids

    def lose(self, request_ids: Iterable[str], error: EngineFailed) -> list[Delta]:
        """End all that is open of these requests with an error each."""
        found = [(request_id, sorted(self._samples.get(request_id, ()))) for request_id in sorted(request_ids)]
        self.end(request_id for request_id, samples in found if samples)
        return [Delta(request_id=id_, sample=sample, error=error) for id_, samples in found for sample in samples]


def requests_of(deltas: Iterable[Delta]) -> frozenset[str]:
    """Return the requests that these deltas belong to."""
    return frozenset(delta.request_id for delta in deltas)


def sequences_of(
    prepared: PreparedRequest, *, illustration: PlacedImages | None = None, records: Items[Record | None] = ()
) -> list[Sequence]:
    """Return one sequence for each completion of a request.  records: by sample; none keep nothing of any"""
    request = prepared.request
    return [
        Sequence(
            request,
            prepared.token_ids,
            sample=sample,
            max_tokens=prepared.max_tokens,
            num_dropped_tokens=prepared.num_dropped_tokens,
            shown_prompt=prepared.shown_prompt,
            detokenizer=prepared.detokenizers[sample],
            matcher=prepared.matchers[sample] if prepared.matchers else None,
            illustration=illustration,
            record=records[sample] if records else None,
            prediction=prepared.prediction,
        )
        for sample in request.samples
    ]


def use_threads(config: EngineConfig) -> None:
    """Have torch compute in as many threads as the model's settings say."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)


class ReplicaEngine(Driver):
    """Our engine as a replica sees it; implements `replica.engine.Engine`.

    core: belongs to the driver's thread once started; any thread may read its load and its counters
    """

    def __init__(self, core: Engine, adapters: tuple[AdapterCard, ...] = (), matcher: Matcher | None = None) -> None:
        config, model = core.config, core.model
        super().__init__(core, niceness=core.niceness, computes_here=model.device.type == "cpu")
        self.core, self.config, self.eos_token_ids = core, config, model.eos_token_ids
        self.adapters = Staging(core, lambda run: self.nudge(lambda _: run()), matcher)
        self.images = make_encoder(model, config)
        self.card = ModelCard(
            name=config.name,
            root=config.path,
            created=0,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            adapters=adapters,
            max_num_sequences=config.max_num_sequences,
            max_waiting=config.max_waiting,
            kv_cache_bytes=model.kv_cache_bytes * config.tensor_parallel,
            block_size=config.block_size,
            records=record_card(config, model.module, head=model.head),
            images=image_card(model),
            max_mixed_adapters=min(MAX_MIXED_ADAPTERS, config.max_adapters),
            capabilities=EVERYTHING,
            numerics=f"{weights_sample(Path(config.path))} {model.dtype} {config.weights}",
        )
        self._record_bounds = RecordBounds.of(model.module, max_bytes=config.max_recorded_bytes, head=model.head)
        self.news: Callable[[int], News] = core.news

    @classmethod
    def load_model(cls, config: EngineConfig, adapters: Items[AdapterRecord]) -> tuple[Self, TextTokenizer]:
        """Load a model and its adapters; blocks.

        adapters: as found on disk; one that does not fit is kept with its reason and stops nothing
        Raises ModelNotSupported.
        """
        settle_memory()
        use_threads(config)
        model, tokenizer = load_with_tokenizer(config)
        matcher = matcher_of(model) if adapters else None
        bound, cards = bind_adapters(adapters, model.module, shard=model.shard, matcher=matcher)
        loader = ThreadPoolExecutor(1, thread_name_prefix="adapters", initializer=compute_alone)
        core = Engine(config, model, tokenizer, bound, loader=loader)
        return cls(core, cards_that_fit(core, cards), matcher), tokenizer

    @property
    def residency(self) -> Residency:
        return self.core.residency

    def start(self, deliver: Deliver) -> None:
        self.core.on_staged = self.nudge
        super().start(deliver)

    def warm(self) -> None:
        self.core.model.downcast.start()

    give_back_memory = staticmethod(give_back_freed_memory)

    def sequences(self, prepared: PreparedRequest) -> list[Sequence]:
        request, token_ids = prepared.request, prepared.token_ids
        records = self._record_bounds.records(request, len(token_ids), max_tokens=prepared.max_tokens)
        tower = self.core.model.tower
        illustration = None
        if prepared.images and tower is not None:
            illustration = place_images(token_ids, prepared.images, token_id=tower.token_id)
        sequences = sequences_of(prepared, illustration=illustration, records=records)
        self.take_over(sequences)
        return sequences

    def close(self) -> None:
        self.adapters.close()
        if self._thread.ident is not None:
            super().close()
            self.core.close()
